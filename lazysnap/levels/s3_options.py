"""``storage_options`` of S3 levels: the names are those of s3fs, the values go to botocore."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import botocore
import botocore.session
import fsspec
from botocore.config import Config

_CREDENTIALS = {
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
}
_SUPPORTED = (
    *_CREDENTIALS,
    "profile",
    "anon",
    "endpoint_url",
    "use_ssl",
    "client_kwargs",
    "config_kwargs",
    "requester_pays",
    "s3_additional_kwargs",
)


@dataclass(frozen=True)
class S3Options:
    """Arguments of botocore."""

    profile: str | None
    client: Mapping[str, Any]
    """Of ``Session.create_client``."""
    config: Mapping[str, Any]
    """Of ``botocore.config.Config``."""
    requests: Mapping[str, Any]
    """Of every request whose operation knows them."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "S3Options":
        """Also looks into fsspec's configuration, as s3fs does. Raises: ValueError."""
        options = {**fsspec.config.conf.get("s3", {}), **given}
        unknown = sorted(options.keys() - set(_SUPPORTED))
        if unknown:
            raise ValueError(f"storage_options {unknown} are not supported here; use {', '.join(_SUPPORTED)}")
        client = {name: options[name] for name in ("endpoint_url", "use_ssl") if options.get(name) is not None}
        client |= {_CREDENTIALS[name]: options[name] for name in _CREDENTIALS if options.get(name) is not None}
        config = dict(options.get("config_kwargs") or {})
        if options.get("anon"):
            config["signature_version"] = botocore.UNSIGNED
        payer = {"RequestPayer": "requester"} if options.get("requester_pays") else {}
        return cls(
            options.get("profile"),
            {**client, **(options.get("client_kwargs") or {})},
            config,
            {**payer, **(options.get("s3_additional_kwargs") or {})},
        )

    def create_client(self, defaults: Mapping[str, Any]) -> Any:
        """A client in a session of its own, which reads credentials anew; ``defaults`` are for the configuration.

        Raises: what botocore raises.
        """
        session = botocore.session.Session(profile=self.profile)
        config = {**defaults, **self.config, "s3": {**defaults["s3"], **(self.config.get("s3") or {})}}
        return session.create_client("s3", config=Config(**config), **self.client)
