"""The service Blaxel through its SDK: asked safely, answered in errors of ours, never with a key.

The SDK is imported here and nowhere else, when the first sandbox is wanted. What may be asked twice
is asked again where the answer was lost or the service is busy: a look, a deletion, and a creation
whose name bears a mark of ours, so that the one that was made without our hearing of it is found.
"""

import os
import secrets
import warnings
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import anyio

from loops_cookbook.errors import MissingExtra, SandboxError, SandboxUnavailable
from loops_cookbook.problems import one_line
from loops_cookbook.sandboxes.base import Entry, SandboxSpec

IMAGE = "blaxel/base-image:latest"
"""The service's own, where a config names none."""
NAME_LIMIT = 49
"""Characters of a name, by the service's rules."""
KEY, WORKSPACE, REGION = "BL_API_KEY", "BL_WORKSPACE", "BL_REGION"
RUN_LABEL, MARK_LABEL = "loops-run", "loops-mark"

CALL_SECONDS = 60.0
_PAUSES = (0.5, 2.0, 5.0)
"""Before each further try, in seconds."""
_BUSY = {408, 425, 429, 500, 502, 503, 504}
_STEP_SECONDS = 0.5
_GONE = {"TERMINATED", "DELETED"}
_SECRETS = (KEY, "BL_CLIENT_CREDENTIALS")
# To be sure of no way out: everything has to go through the service's proxy, which may go nowhere.
_NO_NETWORK = {
    "proxy": {"allowedDomains": ["nothing.invalid"]},
    "firewall": {"rulesets": ["proxy"]},
}

T = TypeVar("T")


def require_sdk() -> None:
    """Make sure that the SDK is installed; imports nothing.

    Raises:
        MissingExtra: it is not.
    """
    if find_spec("blaxel") is None:
        raise MissingExtra('sandbox.backend = "blaxel"', "blaxel")


def missing_credentials(values: Mapping[str, str]) -> list[str]:
    """What the service needs to be told by the environment and is not."""
    wanted = {
        KEY: "`loops run` needs it, so set it (or log in with `bl login`)",
        WORKSPACE: "`loops run` needs it, so set it (or log in with `bl login`)",
        REGION: "the service chooses a region; set it to choose one",
    }
    return [
        f"{name}: neither the environment nor .env has it; {why}"
        for name, why in wanted.items()
        if not values.get(name)
    ]


def workspace() -> str:
    """Where sandboxes are made.

    Raises:
        SandboxError: neither the environment nor the SDK knows.
    """
    with answered(f"{WORKSPACE} is not set"):
        return os.environ.get(WORKSPACE) or str(_core().settings.workspace or "")


async def ask_for_nothing() -> None:
    """See whether the service answers with this key and workspace.

    Raises:
        SandboxUnavailable: why not.
    """
    try:
        await _asked("the list of sandboxes", lambda: _core().SandboxInstance.list(limit=1))
    except SandboxError as error:
        raise SandboxUnavailable(
            f"sandbox.backend: blaxel gives no sandbox ({error}): check {KEY} and {WORKSPACE}"
        ) from error


async def made(entry: Entry, spec: SandboxSpec) -> Any:
    """Make a sandbox under its name; the SDK's object of it.

    Raises:
        SandboxError: it could not be made, or the name is somebody else's.
    """
    mark = secrets.token_hex(8)
    wanted = {
        "name": entry.name,
        "image": spec.image or IMAGE,
        "memory": spec.memory_mb,
        "ttl": f"{int(spec.lifetime_seconds)}s",
        "labels": {RUN_LABEL: entry.run, MARK_LABEL: mark},
        **({} if spec.network else {"network": _NO_NETWORK}),
    }

    async def make() -> Any:
        try:
            return await _core().SandboxInstance.create(wanted)
        except Exception as error:
            found = await _looked_for(entry.name)
            if found is not None and labels_of(found).get(MARK_LABEL) == mark:
                return found  # it was made, and the answer was lost
            if found is not None and status_of(error) == 409:
                raise SandboxError(
                    f"sandbox {entry.name}: the name is taken in workspace {workspace()}"
                ) from None
            raise

    instance = await _asked(f"sandbox {entry.name}", make)
    with answered(f"sandbox {entry.name} is not ready"), anyio.fail_after(CALL_SECONDS):
        while str(instance.status) != "DEPLOYED":
            await anyio.sleep(_STEP_SECONDS)
            instance = await _core().SandboxInstance.get(entry.name)
    return instance


async def found(name: str) -> Any | None:
    """A sandbox by its name, or None where it is gone."""
    return await _asked(f"sandbox {name}", lambda: _looked_for(name))


async def delete(name: str) -> None:
    """Delete a sandbox; returns when it is gone.

    Raises:
        SandboxError: that is not confirmed.
    """

    async def ask() -> None:
        try:
            await _core().SandboxInstance.delete(name)
        except Exception as error:
            if status_of(error) != 404:
                raise

    await _asked(f"sandbox {name}", ask)
    while await found(name) is not None:  # noqa: ASYNC110 - nobody tells
        await anyio.sleep(_STEP_SECONDS)


async def named(run: str) -> list[str]:
    """The names of a run's sandboxes."""

    async def ask() -> list[str]:
        page = await _core().SandboxInstance.list(limit=50)
        every = [instance async for instance in page.auto_paging_iter()]
        return sorted(
            str(each.metadata.name)
            for each in every
            if labels_of(each).get(RUN_LABEL) == run and not _is_gone(each)
        )

    return await _asked(f"the sandboxes of {run}", ask)


def labels_of(instance: Any) -> Mapping[str, str]:
    """The labels of a sandbox."""
    labels = getattr(instance.metadata, "labels", None)
    return labels.to_dict() if labels else {}


def is_passing(error: BaseException) -> bool:
    """Whether the same call may go through a moment later."""
    status = status_of(error)
    if status is not None:
        return status in _BUSY
    return isinstance(error, _transport_errors())


class answered:
    """What the SDK and the network raise, as the error of a sandbox, in one line without a key."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, SandboxError):
            # Without its cause: that holds what was sent, and a traceback would print it.
            raise SandboxError(f"{self._what}: {_told(error)}") from None


async def close(instance: Any) -> None:
    """Close the connections to a sandbox; the SDK keeps them open for good."""
    with anyio.CancelScope(shield=True):
        for door in (instance.process, instance.fs):
            with suppress(Exception):  # nobody needs them any more
                await door.get_client().aclose()


async def _asked(what: str, ask: Callable[[], Awaitable[T]]) -> T:
    """Ask what may be asked twice, again where the service is busy or out of reach."""
    with answered(what):
        for pause in _PAUSES:
            try:
                with anyio.fail_after(CALL_SECONDS):
                    return await ask()
            except Exception as error:
                if isinstance(error, SandboxError) or not is_passing(error):
                    raise
            await anyio.sleep(pause)
        with anyio.fail_after(CALL_SECONDS):
            return await ask()


async def _looked_for(name: str) -> Any | None:
    try:
        instance = await _core().SandboxInstance.get(name)
    except Exception as error:
        if status_of(error) == 404:
            return None
        raise
    return None if _is_gone(instance) else instance


def _is_gone(instance: Any) -> bool:
    """A deleted sandbox can be read for some minutes more."""
    return str(instance.status) in _GONE


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error is about, if it is about one."""
    for name in ("status_code", "status"):
        status = getattr(error, name, None)
        if isinstance(status, int):
            return status
    return None


def _transport_errors() -> tuple[type[Exception], ...]:
    import httpx

    return (TimeoutError, httpx.TransportError)


def _told(error: Exception) -> str:
    told = one_line(str(error)) or type(error).__name__
    for name in _SECRETS:
        if secret := os.environ.get(name):
            told = told.replace(secret, "***")
    return told


def _core() -> Any:
    """The SDK.

    Raises:
        MissingExtra: it is not installed.
    """
    require_sdk()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what its own dependencies say while they load
        core = import_module("blaxel.core")
    # Told once by `loops check`, and by the SDK as something that its caller should mend.
    warnings.filterwarnings("ignore", message=".*no region set", category=FutureWarning)
    return core
