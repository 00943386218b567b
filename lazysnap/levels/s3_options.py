"""``storage_options`` of S3 levels: the names are those of s3fs, the values go to botocore."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import botocore
import botocore.session
import fsspec
from botocore.config import Config

_OF_CLIENT = {
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
    "endpoint_url": "endpoint_url",
}
_SUPPORTED = (
    *_OF_CLIENT,
    "use_ssl",
    "profile",
    "anon",
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
        """What is not given comes from fsspec's configuration, as in s3fs. Raises: ValueError, for other options."""
        unknown = sorted(given.keys() - set(_SUPPORTED))
        if unknown:
            raise ValueError(f"storage_options {unknown} are not supported here; use {', '.join(_SUPPORTED)}")
        options = {**fsspec.config.conf.get("s3", {}), **given}
        client = {"use_ssl": options.get("use_ssl", True), **(options.get("client_kwargs") or {})}
        client |= {theirs: options[name] for name, theirs in _OF_CLIENT.items() if options.get(name) is not None}
        config = dict(options.get("config_kwargs") or {})
        if options.get("anon"):
            config["signature_version"] = botocore.UNSIGNED
        payer = {"RequestPayer": "requester"} if options.get("requester_pays") else {}
        return cls(
            options.get("profile"),
            client,
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
