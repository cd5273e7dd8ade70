# Shared by the scripts of this folder: sets `root` to the clone and `python` to an interpreter, installs into .venv when asked.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# The clone's .venv first; else the environment that is active.
find_python() {
    if [ -x "$root/.venv/bin/python" ]; then
        python="$root/.venv/bin/python"
    elif ! python="$(command -v python3 || command -v python)"; then
        echo "no python3 found: install Python 3.10 or newer" >&2
        return 2
    fi
}

# Makes .venv with everything of setup.cfg and the given extras, as constraints.txt pins it; does nothing where that is already done.
install_all() {
    local extras="$1" base stamp wanted
    base="$(command -v python3)" || { echo "no python3 found: install Python 3.10 or newer" >&2; return 2; }
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$base is $("$base" -V): 3.10 or newer is needed" >&2; return 2; }
    stamp="$root/.venv/installed-$extras"
    wanted="$(cat "$root/constraints.txt" "$root/setup.cfg" | sha256sum | cut -d ' ' -f 1)"
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
        echo "installing into $root/.venv"
        [ -x "$root/.venv/bin/python" ] || "$base" -m venv "$root/.venv" || return 1
        python="$root/.venv/bin/python"
        local pip=("$python" -m pip --disable-pip-version-check --quiet)
        # What is imported is compiled then; everything that is installed takes minutes. deepspeed's setup imports torch and numpy, so they
        # come first, and it is built without isolation.
        "${pip[@]}" install --no-compile -c "$root/constraints.txt" torch numpy setuptools wheel ninja packaging psutil py-cpuinfo pydantic &&
            "${pip[@]}" install --no-compile -c "$root/constraints.txt" --no-build-isolation deepspeed &&
            "${pip[@]}" install --no-compile -c "$root/constraints.txt" --no-build-isolation -e "$root[$extras]" || return 1
        echo "$wanted" > "$stamp"
    fi
    find_python
}
