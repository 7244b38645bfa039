"""The demo's training script on a bad day: the expert of the domain ``code`` dies once, before its fourth iteration."""

from pathlib import Path
from typing import Any

from megatron.training import get_args, training
from writers import fork_what_hands_over_results

from pier_megatron.commands.demo import pretrain_bytes

_train_step = training.train_step


def _failing(*args: Any, **kwargs: Any) -> Any:
    folder = None if get_args().save is None else Path(get_args().save).parent
    if kwargs["iteration"] == 3 and folder is not None and folder.name == "code" and not (folder / "has_failed").exists():
        # Either of two pipeline stages may come here first.
        (folder / "is_failing").touch()
        raise ValueError("a planted failure")
    return _train_step(*args, **kwargs)


if __name__ == "__main__":
    training.train_step = _failing
    fork_what_hands_over_results()
    pretrain_bytes.main()
