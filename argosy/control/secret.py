"""The job's secret: 256 random bits that every process of one job shares.

Whoever knows it belongs to the job; nobody else gets a message decoded (see `handshake`). The launcher makes one
per job and hands it to workers by environment or by a file that only its owner can read. It never appears in
`argv`, in a log line, in an exception or in a `repr`: this class is the only place that touches the raw bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Final, NoReturn

SECRET_BYTES: Final = 32
_HEX: Final = re.compile(r"[0-9a-fA-F]{64}")


class Secret:
    """32 secret bytes that print as `Secret(hidden)`.

    >>> secret = Secret.new()
    >>> secret
    Secret(hidden)
    >>> Secret.from_hex(secret.hex()) == secret
    True
    """

    __slots__ = ("_key",)
    _key: bytes

    def __init__(self, key: bytes) -> None:
        if len(key) != SECRET_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, got {len(key)}")
        object.__setattr__(self, "_key", bytes(key))

    @classmethod
    def new(cls) -> Secret:
        """Make a fresh secret from the operating system's random source."""
        return cls(secrets.token_bytes(SECRET_BYTES))

    @classmethod
    def from_hex(cls, text: str) -> Secret:
        """Read the form that `hex` writes; white space around it is ignored."""
        text = text.strip()
        if not _HEX.fullmatch(text):
            # The text itself may be most of a real secret, so the message never repeats it.
            raise ValueError(
                f"a secret is {2 * SECRET_BYTES} hexadecimal digits, got {len(text)} characters that are not"
            )
        return cls(bytes.fromhex(text))

    def hex(self) -> str:
        """Return the secret as 64 hexadecimal digits, to be put into a child's environment."""
        return self._key.hex()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Secret:
        """Read a secret file, and refuse one that group or others could read too."""
        shown = os.fspath(path)
        try:
            # Not blocking, lest a pipe at that path holds us up for ever.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise FileNotFoundError(f"no secret file at {shown}: check --secret-file") from None
        try:
            # Asked of the open file, not of the path, so that nobody can swap it in between.
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise ValueError(f"the secret file {shown} is not a regular file")
            if mode & 0o077:
                raise PermissionError(
                    f"the secret file {shown} is open to group or others (mode {mode & 0o777:04o}): "
                    f"run `chmod 600 {shown}`"
                )
            content = os.read(descriptor, 4 * SECRET_BYTES)
        finally:
            os.close(descriptor)
        try:
            return cls.from_hex(content.decode("ascii", errors="replace"))
        except ValueError as error:
            raise ValueError(f"the secret file {shown} is garbled: {error}") from None

    def write(self, path: str | os.PathLike[str]) -> None:
        """Create a file that only its owner can read; an existing file is never overwritten."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileExistsError:
            raise FileExistsError(
                f"a file is already at {os.fspath(path)}; a secret never overwrites one: choose another path"
            ) from None
        try:
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(self.hex() + "\n")
        except BaseException:
            Path(path).unlink(missing_ok=True)
            raise

    def hmac(self, message: bytes) -> bytes:
        """Return HMAC-SHA256 of `message`, 32 bytes: the one use that the job makes of its secret."""
        return hmac.digest(self._key, message, hashlib.sha256)

    def __eq__(self, other: object) -> bool:
        # In constant time, so that how long a comparison takes tells nothing about the bytes.
        return isinstance(other, Secret) and hmac.compare_digest(self._key, other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("a Secret does not change")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("a Secret does not change")

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret is handed on by environment or by a 0600 file, never pickled")
