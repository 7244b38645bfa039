"""Reads what Megatron and the plugin have written to TensorBoard."""

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Series:
    """One scalar over a run.

    Attributes:
        steps: Iterations, ascending; where a run was resumed or evaluated several times, an iteration may come again.
        values: Value at each step.
        times: Wall-clock times, in seconds since the epoch.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]
    times: tuple[float, ...]


class TensorBoardLog:
    """The scalars and the arguments of one run.

    Attributes:
        scalars: Scalars by name.
        arguments: Megatron's, as text, by name.
    """

    def __init__(self, directory: Path) -> None:
        """Reads the event files of a run's ``--tensorboard-dir``, or of a folder that has it as ``tensorboard``.

        Raises:
            FileNotFoundError: If there are no event files.
        """
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        inner = directory / "tensorboard"
        folder = inner if inner.is_dir() else directory
        if not list(folder.glob("events.out.tfevents.*")):
            raise FileNotFoundError(f"{directory}: no TensorBoard event files there. Give a run's --tensorboard-dir.")
        accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        accumulator.Reload()
        tags = accumulator.Tags()
        self.scalars: dict[str, Series] = {}
        for name in tags["scalars"]:
            events = accumulator.Scalars(name)
            self.scalars[name] = Series(
                tuple(event.step for event in events),
                tuple(event.value for event in events),
                tuple(event.wall_time for event in events),
            )
        suffix = "/text_summary"
        self.arguments = {
            name.removesuffix(suffix): accumulator.Tensors(name)[-1].tensor_proto.string_val[0].decode()
            for name in tags["tensors"]
            if name.endswith(suffix)
        }
