/* A process that waits in the kernel (state D) for some seconds, then runs for a second, and so on: the parent of a vfork. Argument: seconds. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    int seconds = argc > 1 ? atoi(argv[1]) : 2, status;

    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("ready\n");
    for (int n = 1; access("/gate/end", F_OK); n++) {
        pid_t child = vfork();
        if (child == 0) {
            sleep(seconds);
            _exit(7);
        }
        if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 7) {
            printf("wrong: the child's exit status is %x\n", status);
            return 1;
        }
        printf("ok %d\n", n);
        sleep(1);
    }
    return 0;
}
