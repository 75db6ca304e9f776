"""Which Midsentence this is."""

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    try:
        return version("midsentence")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0+checkout"
