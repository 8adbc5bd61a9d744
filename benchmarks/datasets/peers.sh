#!/bin/sh
# Installs the tools that the benchmark compares with, each into an environment of its own, so that none of them shapes our lock file.
#
#     sh benchmarks/datasets/peers.sh [datatrove] [rensa] [presidio]      (all three without arguments)
#
# They land in $FT_BENCH_PEERS (default: a directory under /tmp). TRL needs nothing here: it belongs to the project's `train` extra.
set -eu
cd "$(dirname "$0")/../.."
TARGET="${FT_BENCH_PEERS:-/tmp/ft_bench_peers}"
UV=.venv/bin/uv
export UV_LINK_MODE="${UV_LINK_MODE:-copy}"
UV_FIND_LINKS="${UV_FIND_LINKS:-$(python3 -m pip config get global.find-links 2>/dev/null || true)}"
export UV_FIND_LINKS
[ $# -gt 0 ] || set -- datatrove rensa presidio
mkdir -p "$TARGET"
for peer in "$@"; do
    case "$peer" in
        # datatrove 0.10 hands str to xxhash, which 4.x refuses; the others are what its word 5-grams need.
        datatrove) packages='datatrove==0.10.1 xxhash<4 orjson nltk spacy regex tokenizers' ;;
        rensa) packages='rensa' ;;
        presidio) packages='presidio-analyzer' ;;
        *) echo "unknown peer '$peer'; there are datatrove, rensa, presidio" >&2; exit 2 ;;
    esac
    [ -x "$TARGET/$peer/bin/python" ] || "$UV" venv --quiet --python python3 "$TARGET/$peer"
    # shellcheck disable=SC2086  # a list of packages
    "$UV" pip install --quiet --python "$TARGET/$peer/bin/python" $packages || { echo "$peer cannot be installed here" >&2; continue; }
    echo "$peer is ready in $TARGET/$peer"
done
