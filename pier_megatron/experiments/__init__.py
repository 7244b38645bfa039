"""Systems of other papers, each in a folder: they import the core, and the core does not know them.

A folder may have a ``feature`` (:class:`pier_megatron.features.Feature`) and a ``command`` of ``pier-megatron``. To remove an
experiment, delete its folder and its line here.
"""

import importlib
import importlib.util
from types import ModuleType

EXPERIMENTS = {
    "layered": "",
    "skipping": "",
    "compression": "",
    "experts": "plan, score and mix experts that train without communication",
}
"""Purposes of their commands, by folder; empty without one. In the order in which features check a run and speak of it."""


def modules(name: str) -> dict[str, ModuleType]:
    """Returns the modules of one name, ``feature`` or ``command``, of the experiments that have one."""
    places = {folder: f"{__name__}.{folder}.{name}" for folder in EXPERIMENTS}
    return {folder: importlib.import_module(place) for folder, place in places.items() if importlib.util.find_spec(place)}
