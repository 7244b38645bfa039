#!/bin/sh
# Prints a Python that megatron-core runs on (>= 3.12, with venv), or says what to do when there is none.
# Order: $PYTHON, versioned names on the PATH, python3, what pyenv has installed.
set -u

usable() {
    "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

if [ -n "${PYTHON:-}" ]; then
    if usable "$PYTHON"; then
        command -v "$PYTHON"
        exit 0
    fi
    echo "PYTHON=$PYTHON is not a Python >= 3.12 with venv. Point it at one, or unset it to have one searched." >&2
    exit 1
fi
for name in python3.12 python3.13 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do
    path=$(command -v "$name" 2>/dev/null) || continue
    if usable "$path"; then
        echo "$path"
        exit 0
    fi
done
cat >&2 <<'MESSAGE'
No Python >= 3.12 with the venv module found: megatron-core 0.17 and newer need it.
Looked for $PYTHON, python3.12, python3.13, python3 and pyenv's versions. Remedies, any one of them:
    pyenv install 3.12
    apt-get install python3.12 python3.12-venv     (or your system's package of that name)
    make PYTHON=/path/to/python3.12 ...
MESSAGE
exit 1
