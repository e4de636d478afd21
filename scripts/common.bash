# What the scripts here share. Sourced by them.

fail() {
    echo "error: $1" >&2
    exit 2
}

# Set `unmask` to the command that runs it: the one on the PATH, that of this checkout, or the package of the Python on the PATH.
find_unmask() {
    PATH=$PATH:$(dirname "${BASH_SOURCE[0]}")/../.venv/bin # what `make` installs
    local python
    if command -v unmask >/dev/null; then
        unmask=(unmask)
    elif python=$(command -v python3 || command -v python) && "$python" -c "import unmask.cli" 2>/dev/null; then
        unmask=("$python" -m unmask)
    else
        fail "unmask is not installed: pip install 'unmask[train,rewards]', or activate its environment"
    fi
}
