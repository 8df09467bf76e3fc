#!/bin/bash
# Wheels for a Linux x86-64 host without a network, into .whl; `make wheelhouse` calls this:
#
#   cluster/wheelhouse.sh PYTHON cuda|cpu|none [INDEX [HOST_PYTHON]]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 torch=$2 index=${3:-} version=${4:-3.12}

case $torch in
    none | cuda) ;;
    cpu) [ -n "$index" ] || {
        echo "TORCH=cpu needs the address of PyTorch's CPU index, as its site gives it: make wheelhouse TORCH=cpu TORCH_INDEX=…" >&2
        exit 1
    } ;;
    *)
        echo "TORCH is cuda, cpu or none, and not $torch: make wheelhouse TORCH=cuda" >&2
        exit 1
        ;;
esac
# pip reads what a package needs on which system by the system that it runs on.
if [ "$torch" != none ] && [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "TORCH=$torch is made on Linux x86-64, where the host's packages can be resolved; this is $(uname -sm)" >&2
    exit 1
fi

rm -rf .whl # two builds of torch in one folder would be a choice for pip
download=("$python" -m pip download --quiet --only-binary=:all: --dest .whl)
for tag in linux manylinux{1,2010,2014} manylinux_2_{5..28}; do # nothing newer than glibc 2.28 has
    download+=(--platform "${tag}_x86_64")
done
if [ "$torch" = none ]; then
    "${download[@]}" --no-deps --python-version "$version" --requirement course_lib/authoring/wheels.txt
    exit
fi
built=()
if [ "$torch" = cpu ]; then
    "${download[@]}" --no-deps --index-url "$index" torch torchvision
    built=(.whl/torch-*.whl .whl/torchvision-*.whl)
fi
"${download[@]}" "${built[@]}" '.[dev]' 'setuptools>=68'
if [ "$torch" = cpu ] && compgen -G '.whl/nvidia_*' >/dev/null; then
    echo "torch in .whl is built for CUDA: TORCH_INDEX=$index is not PyTorch's CPU index, or pip's settings add another" >&2
    exit 1
fi
