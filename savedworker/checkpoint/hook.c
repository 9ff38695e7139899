/* CRIU's action script: tells the agent which action it is (CRTOOLS_SCRIPT_ACTION) and exits with the agent's answer.
 *
 * A static program, not a script: the worker is frozen meanwhile, and starting an interpreter would take as long as dumping
 * 100 MiB. It is called by a path in the folder where the agent's socket hook.sock lies. An agent that is gone means status
 * 1, which aborts a dump and lets the worker run on.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const char *action = getenv("CRTOOLS_SCRIPT_ACTION");
    const char *slash = argc ? strrchr(argv[0], '/') : NULL;
    char line[64];
    int length, fd;

    if (!action || !slash) {
        fputs("savedworker hook: not called by CRIU\n", stderr);
        return 1;
    }
    length = snprintf(address.sun_path, sizeof address.sun_path, "%.*s/hook.sock", (int)(slash - argv[0]), argv[0]);
    if (length >= (int)sizeof address.sun_path) {
        fputs("savedworker hook: the path of the socket is too long\n", stderr);
        return 1;
    }
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address)) {
        perror("savedworker hook");
        return 1;
    }
    length = snprintf(line, sizeof line, "%s\n", action);
    if (length >= (int)sizeof line || write(fd, line, length) != length || read(fd, line, sizeof line) < 1) {
        perror("savedworker hook: the agent does not answer");
        return 1;
    }
    return line[0] != '0';
}
