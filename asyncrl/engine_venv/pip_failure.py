"""What went wrong when pip failed, read from what it printed: a cause that can be acted upon, and the act."""

from __future__ import annotations

import re

from asyncrl.errors import ConfigError, InfrastructureError, ResourceError

__all__ = ["failure_of"]

_UNREACHABLE = re.compile(
    r"Failed to establish a new connection|Temporary failure in name resolution|Name or service not known|"
    r"ConnectTimeoutError|NewConnectionError|ProxyError|SSLError|CERTIFICATE_VERIFY_FAILED|Connection refused|"
    r"ReadTimeoutError|Max retries exceeded|Network is unreachable"
)
_MISSING = re.compile(r"No matching distribution found for (\S+)")
_WRONG_PYTHON = re.compile(
    r"requires a different Python|Ignored the following versions that require a different python"
)
_CONFLICT = re.compile(r"ResolutionImpossible|conflicting dependencies")
_LINES = 6


def failure_of(output: str, *, what: str, log: str) -> InfrastructureError | ConfigError:
    """The error for pip's ``output``; ``what`` was being installed, the whole output is in ``log``."""
    begin = f"{what} could not be installed: "
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return ResourceError(
            f"{begin}the disk is full; make room (pip also writes to TMPDIR and its cache), and run the command again: "
            f"it goes on where it was"
        )
    if re.search(r"Permission denied|Read-only file system", output):
        return ResourceError(f"{begin}the folder or pip's cache cannot be written (see {log})")
    if _UNREACHABLE.search(output):
        return InfrastructureError(
            f"{begin}the package index cannot be reached; give one with --index-url (or PIP_INDEX_URL, PIP_PROXY, "
            f"PIP_CERT), and run the command again: it goes on where it was. See {log}"
        )
    if (missing := _MISSING.search(output)) is not None:
        reason = (
            "for this version of Python; give another with --python"
            if _WRONG_PYTHON.search(output)
            else "for this machine and Python; a mirror may lack it: name further ones with --extra-index-url"
        )
        return InfrastructureError(f"{begin}no package index that pip knows has {missing[1]} {reason}. See {log}")
    if _CONFLICT.search(output):
        return InfrastructureError(f"{begin}the packages the index has now do not go together. See {log}")
    last = "\n".join(f"  {line}" for line in output.strip().splitlines()[-_LINES:])
    return InfrastructureError(f"{begin}pip says (all of it in {log})\n{last}")
