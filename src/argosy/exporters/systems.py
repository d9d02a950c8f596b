"""Name the systems that plans can be written for."""

from __future__ import annotations

from enum import StrEnum


class System(StrEnum):
    """The systems that plans can be written for."""

    TORCHTITAN = "torchtitan"
    MEGATRON = "megatron"
    DEEPSPEED = "deepspeed"
    FLAGSCALE = "flagscale"
    TORCH = "torch"
    TORCHRUN = "torchrun"
    JOBSET = "jobset"
    KUBEFLOW = "kubeflow"
    SKYPILOT = "skypilot"
    SAILOR = "sailor"

    @property
    def starts_argosy(self) -> bool:
        """Return whether the system starts Argosy's own runtime, which reads the plan itself."""
        return self in (System.TORCHRUN, System.SKYPILOT) or self.needs_image

    @property
    def needs_image(self) -> bool:
        """Return whether the system starts containers."""
        return self in (System.JOBSET, System.KUBEFLOW)
