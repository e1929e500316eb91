#!/bin/sh
# Installs what the tests need and runs them. --quick: formatting, lints and the library's unit tests. Default: everything a change
# must pass. --all: what CI runs. --packages: what a registry would get. With CI=true a test that cannot run is a failure.
set -eu
cd "$(dirname "$0")"

level=default
case "${1:-}" in
    "") ;;
    --quick) level=quick ;;
    --all) level=all ;;
    --packages) level=packages ;;
    *) echo "usage: ./test.sh [--quick | --all | --packages]" >&2; exit 2 ;;
esac

started=$(date +%s)
step() {
    echo "== $*"
    at=$(date +%s)
    "$@"
    echo "== done in $(($(date +%s) - at)) s"
}

# A Debian package, where we may install it; otherwise say what is missing.
install() {
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        apt-get update -qq || true
        step apt-get install -y --no-install-recommends "$1"
    else
        echo "missing: on Debian, apt-get install $1" >&2
        exit 2
    fi
}

need() {
    command -v "$1" >/dev/null 2>&1 || install "$2"
}

python_environment() {
    if [ ! -x .venv/bin/python ]; then
        python3 -c 'import ensurepip' 2>/dev/null || install python3-venv
        python3 -m venv .venv
    fi
    .venv/bin/python -c 'import numpy, scipy, onnx, onnxruntime, safetensors' 2>/dev/null ||
        .venv/bin/pip install --quiet --disable-pip-version-check numpy scipy onnx onnxruntime safetensors
}

# Tools that check or package, none of which a test imports; versions fixed, so that a new release is no surprise.
tools() {
    [ -x target/tools/bin/python ] || {
        python3 -c 'import ensurepip' 2>/dev/null || install python3-venv
        python3 -m venv target/tools
    }
    target/tools/bin/pip install --quiet --disable-pip-version-check "$@"
}

ruff_check() {
    tools ruff==0.17.4
    target/tools/bin/ruff check
}

# Every page in the navigation, every link and anchor there.
site() {
    tools -r docs/requirements.txt
    NO_MKDOCS_2_WARNING=1 target/tools/bin/mkdocs build --strict --quiet
}

# What a registry would get: the crates build from their packages alone, the program installs, the source distribution
# builds in a fresh environment, and the wheel is small.
packages() {
    cargo publish --dry-run --allow-dirty --quiet -p simplicit-data -p simplicit -p simplicit-cli
    cargo install --quiet --locked --force --path crates/simplicit-cli --root target/installed
    (cd target/installed && bin/simplicit --version && bin/simplicit quickstart --quiet --out quickstart)
    tools 'maturin>=1.7,<2'
    rm -rf target/sdist target/sdist-environment
    target/tools/bin/maturin sdist --out target/sdist
    python3 -m venv target/sdist-environment
    # Dependencies that are built already are not built again.
    CARGO_TARGET_DIR="$PWD/target" target/sdist-environment/bin/pip install --quiet --disable-pip-version-check target/sdist/*.tar.gz
    (cd target/sdist-environment && bin/python -c 'import simplicit; print("from the source distribution:", simplicit.__version__)')
    wheel=$(wc -c <"$(ls target/wheels/simplicit-*.whl)")
    echo "wheel: $wheel bytes"
    [ "$wheel" -lt 5000000 ] || { echo "expected a wheel below 5 MB" >&2; return 1; }
}

# The wheel in an environment of its own, with what its tests need; PyTorch (6 GB with its libraries) only with --all.
python_package() {
    rm -rf target/python-environment target/wheels
    python3 -m venv target/python-environment
    target/python-environment/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir target/wheels .
    packages="pytest mypy scikit-learn cvxpy onnx onnxruntime ray tqdm papermill ipykernel matplotlib"
    [ "$level" != all ] || packages="$packages torch torchvision transformers"
    # shellcheck disable=SC2086
    target/python-environment/bin/pip install --quiet --disable-pip-version-check target/wheels/*.whl $packages
}

documentation() {
    RUSTDOCFLAGS="-D warnings" cargo doc --release --workspace --no-deps
}

# Of the whole workspace: for one package alone cargo would build the library again, with other features of its dependencies.
damaged_files() {
    cargo build --release --quiet --workspace --examples
    target/release/examples/fuzz_model_file 30
}

need cargo cargo
need cc gcc
need c++ g++
need python3 python3

if [ "$level" = packages ]; then
    step python_package
    step packages
    exit 0
fi
step cargo fmt --all --check
step ruff_check
[ "$level" != all ] || step site
step cargo clippy --release --workspace --all-targets -- -D warnings
# Before the tests: it takes a minute, and a broken link should not wait for them.
[ "$level" = quick ] || step documentation
if [ "$level" = quick ]; then
    # The library's own tests alone: those of the other crates would have it built a second time, without its tests.
    step cargo test --release -p simplicit --lib
else
    need chromium chromium
    step python_environment
    export SIMPLICIT_PYTHON="$PWD/.venv/bin/python"
    # Not --all-targets: benchmarks are built by clippy and run by `cargo bench` alone.
    step cargo test --release --workspace --lib --bins --tests --examples
    step cargo test --release --workspace --doc
    step damaged_files
    step python_package
    # Without --all there is no PyTorch: its tests are skipped then, with CI=true too.
    [ "$level" = all ] || unset CI
    step target/python-environment/bin/python -m pytest python/tests
fi
[ -n "${SIMPLICIT_CIFAR100:-}" ] || echo "== not run: ResNet-20 on CIFAR-100 (SIMPLICIT_CIFAR100 names no folder)"
echo "== all passed in $(($(date +%s) - started)) s"
