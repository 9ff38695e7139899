#!/bin/bash
# A chain of processes over pipes with a file at its end. usage: pipeline.sh COUNTER FOLDER SEED STEPS
address=$1 folder=$2 seed=$3 steps=$4
nonce=$(head -c 8 /dev/urandom | od -An -tx1 | tr -d ' \n')
mkdir -p "$folder"

say() { # posts a message until it is answered
    local answer
    until { exec 3<>"/dev/tcp/${address%:*}/${address#*:}"; } 2>/dev/null &&
        printf '%s\n' "$*" >&3 2>/dev/null && read -r answer <&3 2>/dev/null && [[ $answer == ok ]]; do
        exec 3>&-
        sleep 0.02
    done
    exec 3>&-
}

for ((i = 0; i < steps; i++)); do
    echo "$i"
done | while read -r number; do
    echo "$number $(((number * number + seed) % 1000003))"
done | tee "$folder/squares.txt" | {
    sum=$seed
    while read -r number square; do
        sum=$(((sum * 31 + square) % 1000000007))
        echo "$number $sum" >>"$folder/sums.txt"
        echo "$number"
        say step "$nonce" "$number"
        sleep 0.02
    done
}
say file squares.txt "$(od -An -v -tx1 "$folder/squares.txt" | tr -d ' \n')"
say file sums.txt "$(od -An -v -tx1 "$folder/sums.txt" | tr -d ' \n')"
