"""What s3fs, botocore and aiohttp raise, told apart by what is to be done."""

import asyncio
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

import aiohttp
from botocore import exceptions as botocore


class Kind(Enum):
    """What a failed request means."""

    MISSING = auto()
    NO_BUCKET = auto()
    TAKEN = auto()
    """A condition did not hold: there is an object already, or it is another one."""
    RANGE = auto()
    """Behind the end of the object."""
    EXPIRED = auto()
    WRONG = auto()
    """No such key, or a signature that is not of its secret."""
    ABSENT = auto()
    """No credentials at all."""
    REFUSED = auto()
    FULL = auto()
    DAMAGED = auto()
    """The bytes that arrived are not those of the checksum."""
    PASSING = auto()
    """May work the next time."""
    NO_UPLOAD = auto()
    OTHER = auto()


_KINDS = {
    "NoSuchKey": Kind.MISSING,
    "404": Kind.MISSING,
    "NoSuchBucket": Kind.NO_BUCKET,
    "NoSuchUpload": Kind.NO_UPLOAD,
    "PreconditionFailed": Kind.TAKEN,
    "412": Kind.TAKEN,
    "InvalidRange": Kind.RANGE,
    "416": Kind.RANGE,
    "ExpiredToken": Kind.EXPIRED,
    "ExpiredTokenException": Kind.EXPIRED,
    "TokenRefreshRequired": Kind.EXPIRED,
    "RequestExpired": Kind.EXPIRED,
    "InvalidToken": Kind.WRONG,
    "InvalidAccessKeyId": Kind.WRONG,
    "SignatureDoesNotMatch": Kind.WRONG,
    "AccessDenied": Kind.REFUSED,
    "AllAccessDisabled": Kind.REFUSED,
    "AccountProblem": Kind.REFUSED,
    "403": Kind.REFUSED,
    "401": Kind.REFUSED,
    "QuotaExceeded": Kind.FULL,
    "XMinioStorageFull": Kind.FULL,
    "507": Kind.FULL,
    "BadDigest": Kind.DAMAGED,
    "InvalidDigest": Kind.DAMAGED,
    "XAmzContentChecksumMismatch": Kind.DAMAGED,
    "XAmzContentSHA256Mismatch": Kind.DAMAGED,
    "SlowDown": Kind.PASSING,
    "Throttling": Kind.PASSING,
    "ThrottlingException": Kind.PASSING,
    "TooManyRequests": Kind.PASSING,
    "RequestLimitExceeded": Kind.PASSING,
    "RequestTimeout": Kind.PASSING,
    "RequestTimeTooSkewed": Kind.OTHER,
    "IncompleteBody": Kind.PASSING,
    "OperationAborted": Kind.PASSING,
    "ConditionalRequestConflict": Kind.PASSING,
    "NotImplemented": Kind.OTHER,
}
_CREDENTIALS = (
    botocore.NoCredentialsError,
    botocore.PartialCredentialsError,
    botocore.CredentialRetrievalError,
    botocore.TokenRetrievalError,
    botocore.SSOError,
)
_NETWORK = (
    botocore.HTTPClientError,
    botocore.ConnectionError,
    botocore.IncompleteReadError,
    aiohttp.ClientError,
    asyncio.TimeoutError,
    TimeoutError,
    ConnectionError,
)


class Failure(Exception):
    """A request that failed, and what that means."""

    def __init__(self, kind: Kind, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}" if text else code)
        self.kind = kind
        self.code = code
        self.attempt = 1
        """At which attempt: an earlier one may have taken effect, and only its answer was lost."""


def _response(error: BaseException) -> Mapping[str, Any] | None:
    for one in (error, error.__cause__):  # s3fs puts the error of the server behind one of Python's
        response = getattr(one, "response", None)
        if isinstance(response, Mapping):
            return response
    return None


def understand(error: BaseException) -> Failure:
    """What an exception of a request means."""
    if isinstance(error, Failure):
        return error
    response = _response(error)
    if response is not None:
        facts = response.get("Error", {})
        code, text = str(facts.get("Code", "")), str(facts.get("Message", ""))
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        kind = _KINDS.get(code) or _KINDS.get(str(status))
        if kind is None:
            kind = Kind.PASSING if status >= 500 or status == 429 else Kind.OTHER
        return Failure(kind, code or str(status), text)
    name = type(error).__name__
    if isinstance(error, _CREDENTIALS):
        return Failure(Kind.ABSENT, name, str(error))
    is_passing = isinstance(error, _NETWORK) and not isinstance(error, botocore.SSLError)
    return Failure(Kind.PASSING if is_passing else Kind.OTHER, name, str(error))
