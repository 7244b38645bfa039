"""Searches routes for ``--pier-skip-routes`` over unequal nodes and links, and writes them: docs/skipping.md#routes.

python examples/skip_routes.py examples/unequal-nodes.yaml --stages 4 --micro-batches 8 --fraction 0.25 --output routes.json
"""

import argparse
from pathlib import Path
from typing import Any

import yaml
from route_search.play import Grid, Link, play
from route_search.search import Wishes, search

from pier_megatron.experiments.skipping.pipeline.routes import Routes, plain
from pier_megatron.experiments.skipping.pipeline.simulator import BACKWARD


def main() -> None:
    """Searches, writes, and prints the simulated seconds of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nodes", type=argparse.FileType(), help="nodes and links, as in unequal-nodes.yaml")
    parser.add_argument("--stages", type=int, required=True, help="--pipeline-model-parallel-size of the job")
    parser.add_argument("--micro-batches", type=int, required=True, help="micro-batches of a replica in a step")
    parser.add_argument("--fraction", type=float, required=True, help="share of all pairs of stage and micro-batch to skip")
    parser.add_argument("--output", type=Path, required=True, help="file for --pier-skip-routes")
    parser.add_argument("--held", type=int, help="micro-batches whose activations a rank may keep (default: --stages)")
    parser.add_argument("--stay", action="store_true", help="micro-batches stay in their replica")
    parser.add_argument("--in-order", action="store_true", help="no stages are swapped")
    parser.add_argument("--place", action="store_true", help="nodes may change places: start them in the printed order")
    options = parser.parse_args()
    found = yaml.safe_load(options.nodes)
    stages, ranks = options.stages, len(found["nodes"]) * found["ranks-per-node"]
    if ranks % stages:
        parser.error(f"{options.nodes.name}: {ranks} ranks are no multiple of --stages {stages}.")
    grid, replicas = grid_of(found, stages), ranks // stages
    groups = [[replica] for replica in range(replicas)] if options.stay else [range(replicas)]
    wishes = Wishes(options.fraction, options.held or stages, may_swap=not options.in_order, may_move=options.place)
    best = search(grid, options.micro_batches, groups, wishes)
    hosts = tuple(dict.fromkeys(found["nodes"][host]["name"] for host in best.hosts))
    played = best.played
    routes = Routes(stages, replicas, options.micro_batches, played.held, best.paths, played.order, hosts)
    routes.check()
    options.output.write_text(routes.text())
    full = play(grid, plain(stages, replicas, options.micro_batches), stages).seconds
    print(
        f"a step, simulated: {full:.2f} s full, {played.seconds:.2f} s with --pier-skip-routes {options.output} "
        f"({routes.fraction:.1%} skipped, activations of {routes.held} micro-batches on a rank)"
    )
    print(f"start the nodes in this order: {', '.join(hosts)}")


def grid_of(found: dict[str, Any], stages: int) -> Grid:
    """The ranks of the group on its nodes: neighbours are replicas of one stage, as Megatron numbers them."""
    nodes, per_node = found["nodes"], found["ranks-per-node"]
    replicas = len(nodes) * per_node // stages
    links = {
        frozenset(link["sites"]): Link(found["message"] * 1e6 * per_node / (link["bandwidth"] * 1e9), link["latency"] / 1e3)
        for link in found["links"]
    }
    between = [
        [Link(0.0) if one is other else links[frozenset((one["site"], other["site"]))] for other in nodes] for one in nodes
    ]
    devices = tuple(tuple(range(stage * replicas, (stage + 1) * replicas)) for stage in range(stages))
    hosts = tuple(rank // per_node for rank in range(stages * replicas))
    forward = (found["forward"] / 1e3,) * stages
    backward = tuple(BACKWARD * seconds for seconds in forward)
    return Grid(devices, forward, backward, hosts, tuple(node.get("speed", 1.0) for node in nodes), between)


if __name__ == "__main__":
    main()
