"""Calls to AWS: clients made once, bounded retries with back-off, and errors in our own words."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import boto3
import tenacity
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
)

from savedworker.fleet.aws.errors import as_error, rule_for
from savedworker.model.errors import Refused, SavedWorkerError, Temporary

log = logging.getLogger(__name__)

RETRY_FOR = 20.0
"""Seconds for which a throttled call is repeated before the caller hears of it."""
TRIES = 6
CONNECT_TIMEOUT, READ_TIMEOUT = 5, 20


class Aws:
    """One account and region. Thread-safe. All calls raise NoCapacity, Refused or Temporary.

    Args:
        region: Default: what boto3 finds.
        profile: A profile of the AWS configuration; default: what boto3 finds.
        pause: Longest first pause between tries in seconds; it doubles, with jitter.
    """

    def __init__(self, region: str | None = None, profile: str | None = None, pause: float = 0.5) -> None:
        self._region = region
        self._profile = profile
        self._pause = pause
        self._lock = threading.Lock()
        self._clients: dict[str, Any] = {}
        self._session: Any = None

    def client(self, service: str) -> Any:
        """The client of ``service``. Raises Refused without a region, or for a profile that is not there."""
        with self._lock:
            if service not in self._clients:
                try:
                    if self._session is None:
                        self._session = boto3.session.Session(
                            region_name=self._region, profile_name=self._profile
                        )
                    # Adaptive: botocore itself slows down when it is asked to. What remains is retried in call().
                    # SubmitJob has no client token: where its answer is lost, it is looked for and not sent again.
                    attempts = 1 if service == "batch" else 2
                    config = Config(
                        retries={"mode": "adaptive", "total_max_attempts": attempts},
                        connect_timeout=CONNECT_TIMEOUT,
                        read_timeout=READ_TIMEOUT,
                        user_agent_extra="savedworker",
                    )
                    self._clients[service] = self._session.client(service, config=config)
                except NoRegionError as error:
                    raise Refused("no AWS region is set", "set region of the fleet, or AWS_REGION") from error
                except ProfileNotFound as error:
                    raise Refused(f"{error}", "correct profile of the fleet, or AWS_PROFILE") from error
            return self._clients[service]

    @property
    def region(self) -> str:
        """The region's name. Raises Refused."""
        return str(self.client("ec2").meta.region_name)

    def call(self, service: str, operation: str, doing: str, **parameters: Any) -> Any:
        """The answer to ``operation``. ``doing`` begins the message of an error: "starting an instance"."""
        try:
            client = self.client(service)
            retrying = tenacity.Retrying(
                retry=tenacity.retry_if_exception(_is_throttled),
                wait=tenacity.wait_random_exponential(multiplier=self._pause, max=8 * self._pause),
                stop=tenacity.stop_after_attempt(TRIES) | tenacity.stop_after_delay(RETRY_FOR),
                reraise=True,
            )
            return retrying(getattr(client, operation), **parameters)
        except (ClientError, BotoCoreError) as error:
            raise translated(error, doing) from error

    def pages(self, service: str, operation: str, doing: str, key: str, **parameters: Any) -> Iterator[Any]:
        """The items under ``key`` of all pages."""
        token_in, token_out = ("nextToken", "nextToken") if service == "batch" else ("NextToken", "NextToken")
        while True:
            answer = self.call(service, operation, doing, **parameters)
            yield from answer.get(key, ())
            token = answer.get(token_out)
            if not token:
                return
            parameters[token_in] = token


def code_of(error: BaseException) -> str:
    """AWS's code of an error; empty if it has none."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def said(error: SavedWorkerError) -> tuple[str, str]:
    """AWS's own code and message of an error that ``call`` raised."""
    cause = error.__cause__
    if isinstance(cause, ClientError):
        return code_of(cause), str(cause.response.get("Error", {}).get("Message", ""))
    return "", error.message


def _is_throttled(error: BaseException) -> bool:
    return isinstance(error, ClientError) and rule_for(code_of(error), _status(error)).meaning == "throttled"


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400))


def translated(error: ClientError | BotoCoreError, doing: str) -> SavedWorkerError:
    """The same in our words."""
    if isinstance(error, ClientError):
        message = str(error.response.get("Error", {}).get("Message", ""))
        return as_error(doing, code_of(error), message, _status(error))
    text = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return Temporary(
            f"{doing}: there are no AWS credentials",
            retry_after=5.0,
            fix="give the controller a role, or log in: boto3 looks for them in its usual places",
        )
    if isinstance(error, ParamValidationError):
        return Refused(f"{doing}: {text}", "correct the settings of the fleet")
    return Temporary(f"{doing}: {text}", retry_after=5.0)
