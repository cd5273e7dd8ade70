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
        # Again where making it was interrupted; what is there stays.
        "$root/.venv/bin/python" -m pip --version > /dev/null 2>&1 || "$base" -m venv "$root/.venv" || return 1
        python="$root/.venv/bin/python"
        # What is imported is compiled then; everything that is installed takes minutes. deepspeed's setup imports torch and numpy, so they
        # come first, and it is built without isolation. uv does the most of it in seconds; where it reaches no index, pip does it.
        local pip=("$python" -m pip --disable-pip-version-check --quiet install --no-compile -c "$root/constraints.txt")
        "${pip[@]}" torch numpy setuptools wheel ninja packaging psutil py-cpuinfo pydantic uv &&
            { install_with_uv "$root[$extras]" ||
                { "${pip[@]}" --no-build-isolation deepspeed && "${pip[@]}" --no-build-isolation -e "$root[$extras]"; }; } ||
            { echo "not installed: pip says above why (Retrying: its index does not answer)" >&2; return 1; }
        echo "$wanted" > "$stamp"
    fi
    find_python
}

# From the index that pip is set to. Says nothing where it fails: pip says it then.
install_with_uv() {
    local index
    index="$("$python" -m pip config get :env:.index-url 2> /dev/null || "$python" -m pip config get global.index-url 2> /dev/null)"
    UV_HTTP_TIMEOUT=30 "$python" -m uv pip install --quiet --no-progress --python "$python" ${index:+--default-index "$index"} \
        -c "$root/constraints.txt" --no-build-isolation -e "$1" 2> /dev/null
}
