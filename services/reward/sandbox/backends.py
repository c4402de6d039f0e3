"""Which sandbox the settings ask for."""

from __future__ import annotations

from services.reward.sandbox import packages
from services.reward.sandbox.base import Sandbox
from services.reward.sandbox.local import LocalSandbox
from shared.settings import Settings


def build(settings: Settings) -> Sandbox:
    """Returns the sandbox, not yet started. "auto" is "local", which refuses on a host that cannot
    isolate: nothing less safe is ever chosen for anyone. Raises BadRequest for packages that are
    not there."""
    if settings.sandbox == "modal":
        # Its client is installed where it is used only.
        from services.reward.sandbox.on_modal import ModalSandbox

        return ModalSandbox(
            num_slots=settings.sandbox_slots,
            packages=settings.sandbox_packages,
            image=settings.sandbox_image,
        )
    return LocalSandbox(
        isolated=settings.sandbox != "unsafe",
        num_slots=settings.sandbox_slots,
        packages=packages.find(settings.sandbox_packages),
    )
