"""A check for a framework before any other import, so that the error names it, and not a package that it brings."""

from importlib.util import find_spec


def is_installed(package: str) -> bool:
    """True if ``package`` can be imported; it is not imported."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # an import hook refuses it, or a test put None in its place
        return False


def require(who: str, framework: str, extra: str, *packages: str) -> None:
    """Raises: ModuleNotFoundError, if none of ``packages`` is installed, which ``who`` needs."""
    if not any(map(is_installed, packages)):
        here = f" (neither {' nor '.join(packages)})" if len(packages) > 1 else ""
        raise ModuleNotFoundError(
            f'{who} needs {framework}, which is not installed here{here}: run `pip install "lazysnap[{extra}]"`',
            name=packages[0],
        )
