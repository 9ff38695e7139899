/* POSIX timers (signal and thread), interval timers, pending and queued signals, masks, an alternate stack. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t alarms, timer_signals, on_alternate;
static volatile long thread_calls;
static char alternate[65536];

static void wrong(const char *what)
{
    printf("wrong: %s\n", what);
    exit(1);
}

static void on_alarm(int sig) { (void)sig; alarms++; }

static void on_timer(int sig, siginfo_t *info, void *context)
{
    char here;
    (void)sig, (void)context;
    if (info->si_code != SI_TIMER || info->si_value.sival_int != 4711)
        wrong("a timer's signal carries another value");
    timer_signals++;
    on_alternate = &here >= alternate && &here < alternate + sizeof alternate;
}

static void on_thread(union sigval value)
{
    if (value.sival_int != 815)
        wrong("a timer's thread got another value");
    thread_calls++;
}

static timer_t timer(int clock, struct sigevent *event, double every)
{
    timer_t made;
    struct itimerspec when = {{(time_t)every, (long)((every - (time_t)every) * 1e9)}, {(time_t)every, (long)((every - (time_t)every) * 1e9)}};
    if (timer_create(clock, event, &made) || timer_settime(made, 0, &when, NULL))
        wrong("timer_create");
    return made;
}

int main(void)
{
    stack_t stack = {.ss_sp = alternate, .ss_size = sizeof alternate};
    struct sigaction action = {.sa_sigaction = on_timer, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
    struct sigaction plain = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    struct sigevent by_signal = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + 3, .sigev_value.sival_int = 4711};
    struct sigevent by_thread = {.sigev_notify = SIGEV_THREAD, .sigev_notify_function = on_thread, .sigev_value.sival_int = 815};
    struct sigevent none = {.sigev_notify = SIGEV_NONE};
    struct itimerval interval = {{0, 20000}, {0, 20000}};
    struct timespec little = {0, 100000000}, now = {0, 0};
    struct itimerspec left;
    siginfo_t info;
    sigset_t blocked, queued;
    timer_t far;

    setvbuf(stdout, NULL, _IOLBF, 0);
    sigaltstack(&stack, NULL);
    sigaction(SIGRTMIN + 3, &action, NULL);
    sigaction(SIGALRM, &plain, NULL);
    timer(CLOCK_MONOTONIC, &by_signal, 0.03);
    timer(CLOCK_MONOTONIC, &by_thread, 0.05);
    far = timer(CLOCK_MONOTONIC, &none, 100000);
    setitimer(ITIMER_REAL, &interval, NULL);
    sigemptyset(&queued);
    sigaddset(&queued, SIGRTMIN + 5);
    sigaddset(&queued, SIGUSR1);
    sigprocmask(SIG_BLOCK, &queued, NULL);
    kill(getpid(), SIGUSR1);
    for (int i = 0; i < 3; i++)
        sigqueue(getpid(), SIGRTMIN + 5, (union sigval){.sival_int = i});
    printf("ready\n");
    for (int n = 1; access("/gate/end", F_OK); n++) {
        int a = alarms, t = timer_signals;
        long c = thread_calls;
        for (int tries = 0; alarms == a || timer_signals == t || thread_calls == c; tries++) {
            if (tries == 100) {
                printf("alarm %d timer %d thread %d\n", alarms != a, timer_signals != t, thread_calls != c);
                wrong("a timer stands still");
            }
            nanosleep(&little, NULL);
        }
        if (!on_alternate)
            wrong("the alternate stack is not used");
        sigprocmask(SIG_SETMASK, NULL, &blocked);
        if (!sigismember(&blocked, SIGUSR1) || !sigismember(&blocked, SIGRTMIN + 5) || sigismember(&blocked, SIGALRM))
            wrong("the signal mask has changed");
        sigpending(&blocked);
        if (!sigismember(&blocked, SIGUSR1))
            wrong("a pending signal is lost");
        for (int i = 0; i < 3; i++) {
            if (sigtimedwait(&(sigset_t){{1UL << (SIGRTMIN + 5 - 1)}}, &info, &now) != SIGRTMIN + 5 || info.si_value.sival_int != i || info.si_pid != getpid())
                wrong("queued signals are lost or in another order");
        }
        for (int i = 0; i < 3; i++)
            sigqueue(getpid(), SIGRTMIN + 5, (union sigval){.sival_int = i});
        if (timer_gettime(far, &left) || left.it_value.tv_sec < 99000 || left.it_interval.tv_sec != 100000)
            wrong("a far timer has changed");
        printf("ok %d\n", n);
        nanosleep(&little, NULL);
    }
    return 0;
}
