# bash: pipelines in the background with job control, a stopped and continued job, a coprocess, traps and a here-document.
set -m -u
fail() { echo "wrong: $*"; exit 1; }
caught=0
trap 'caught=$((caught + 1))' USR1
mkdir -p /srv/zoo
: >/srv/zoo/bash
(while :; do echo x; sleep 0.05; done) | sed -u y/x/y/ | while read -r line; do echo "$line" >>/srv/zoo/bash; done &
coproc UPPER { while read -r word; do echo "${word^^}"; done; }
sleep 1000 &
sleeper=$!
echo ready
n=0
while [[ ! -e /gate/end ]]; do
    n=$((n + 1))
    before=$(wc -l </srv/zoo/bash)
    echo "hello$n" >&"${UPPER[1]}"
    read -r -t 10 answer <&"${UPPER[0]}" || fail "the coprocess is silent"
    [[ $answer == "HELLO$n" ]] || fail "the coprocess said $answer"
    kill -USR1 $$
    [[ $(seq 1 200 | grep -c 7 | cat) == 38 ]] || fail "a pipeline"
    kill -STOP $sleeper; kill -CONT $sleeper
    kill -0 $sleeper || fail "a job is gone"
    for (( tries = 0; $(jobs -rp | wc -l) != 3; tries++ )); do
        (( tries < 100 )) || fail "jobs: $(jobs)"
        sleep 0.1
    done
    (( caught >= n )) || fail "a trap did not run: $caught of $n"
    for (( tries = 0; $(wc -l </srv/zoo/bash) == before; tries++ )); do
        (( tries < 100 )) || fail "the pipeline in the background stands still"
        sleep 0.1
    done
    cmp -s <(cat <<<"$n") <(echo "$n") || fail "process substitution"
    echo "ok $n"
done
kill %1 %3
echo "done"
exit 0
