"""Errors of botocore, classified by what to do about them."""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from botocore import exceptions as botocore


class Kind(Enum):
    """What a failed request means."""

    MISSING = auto()
    NO_BUCKET = auto()
    REPLACED = auto()
    """The object is another version than the one asked for."""
    RANGE = auto()
    """The range begins behind the end of the object."""
    EXPIRED = auto()
    WRONG = auto()
    """Unknown key, or the signature does not belong to its secret."""
    ABSENT = auto()
    """No credentials were found."""
    REFUSED = auto()
    FULL = auto()
    DAMAGED = auto()
    """The bytes that arrived do not have the checksum that was sent."""
    TRANSIENT = auto()
    NO_UPLOAD = auto()
    OTHER = auto()


_KINDS = {
    "NoSuchKey": Kind.MISSING,
    "404": Kind.MISSING,
    "NoSuchBucket": Kind.NO_BUCKET,
    "NoSuchUpload": Kind.NO_UPLOAD,
    "PreconditionFailed": Kind.REPLACED,
    "412": Kind.REPLACED,
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
    "SlowDown": Kind.TRANSIENT,
    "Throttling": Kind.TRANSIENT,
    "ThrottlingException": Kind.TRANSIENT,
    "TooManyRequests": Kind.TRANSIENT,
    "RequestLimitExceeded": Kind.TRANSIENT,
    "RequestTimeout": Kind.TRANSIENT,
    "RequestTimeTooSkewed": Kind.OTHER,
    "IncompleteBody": Kind.TRANSIENT,
    "OperationAborted": Kind.TRANSIENT,
    "ConditionalRequestConflict": Kind.TRANSIENT,
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
    OSError,
)


class Failure(Exception):
    """A request that failed."""

    def __init__(self, kind: Kind, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}" if text else code)
        self.kind = kind
        self.code = code


def classify(error: Exception) -> Failure:
    """What an exception of a request means."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, botocore.ClientError):
        return _of_response(error.response)
    name = type(error).__name__
    if isinstance(error, _CREDENTIALS):
        return Failure(Kind.ABSENT, name, str(error))
    is_transient = isinstance(error, _NETWORK) and not isinstance(error, botocore.SSLError)
    return Failure(Kind.TRANSIENT if is_transient else Kind.OTHER, name, str(error))


def _of_response(response: Mapping[str, Any]) -> Failure:
    facts = response.get("Error", {})
    code, text = str(facts.get("Code", "")), str(facts.get("Message", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    kind = _KINDS.get(code) or _KINDS.get(str(status))
    if kind is None:
        kind = Kind.TRANSIENT if status >= 500 or status == 429 else Kind.OTHER
    return Failure(kind, code or str(status), text)
