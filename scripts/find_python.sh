#!/bin/sh
# Print a Python >= 3.12 that runs and can make virtual environments; say what to do where there is none.
# A name on PATH proves nothing (pyenv's shims exist for versions that are not switched on), so each candidate is run.
# An argument names the interpreter to use instead of searching.

fits() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

if [ -n "$1" ]; then
    if fits "$1"; then
        echo "$1"
        exit 0
    fi
    echo "$1 is not a Python >= 3.12 that can make virtual environments." >&2
    exit 1
fi

# 3.12 first: the version that the project is developed on.
for name in python3.12 python3.13 python3.14 python3 python; do
    found=$(command -v "$name" 2>/dev/null) && fits "$found" && echo "$found" && exit 0
done

for version in 3.12 3.13 3.14; do
    for found in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version"*/bin/python; do
        fits "$found" && echo "$found" && exit 0
    done
done

found=$(uv python find --no-python-downloads '>=3.12' 2>/dev/null) && fits "$found" && echo "$found" && exit 0

cat >&2 <<'EOF'
No Python >= 3.12 was found on PATH, under pyenv or through uv. Any one of these brings it:

    Debian, Ubuntu    sudo apt-get install python3 python3-venv      (Debian 13, Ubuntu 24.04 and newer)
    macOS             brew install python@3.12
    pyenv             pyenv install 3.12
    uv                uv python install 3.12

A Python that stands elsewhere is named with PYTHON, for example: make serve PYTHON=/opt/python3.12/bin/python3
(On Debian and Ubuntu an installed Python without the package python3-venv is passed over: it cannot make .venv.)
EOF
exit 1
