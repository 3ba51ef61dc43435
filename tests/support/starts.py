"""What makes a GPU's host start a kernel or a copy, counted in a lowered program."""

import collections
import math

# Arrays of tokens that are moved: no kernel beside them does that on the way.
_MOVES = {"concatenate", "dynamic_slice", "dynamic_update_slice", "gather", "pad"}
_MOVES |= {"reduce", "slice", "sort"}
# Here the host waits for the GPU.
_WAITS = {"case", "if", "while"}
_SENDS = {"all_gather", "all_to_all", "collective_permute", "reduce_scatter"}


def of(lowered, least: int, part=None) -> collections.Counter:
    """Count by kind what a lowered program starts.

    The rule: a custom call, a move of ``least`` elements or more, and each array that
    is sent are one each. XLA fuses what else there is with these or with each other.

    Args:
      lowered: what ``jax.jit(f).lower()`` returns.
      least: elements that are not few.
      part: a region of it. If None, all of it.
    """
    module, found = lowered.compiler_ir("stablehlo"), collections.Counter()
    functions = {x.attributes["sym_name"].value: x for x in module.body.operations}

    def count(operation):
        name = operation.name.rpartition(".")[2]
        if name == "call":
            callee = operation.attributes["callee"].value
            count(functions[callee].operation)
        elif name == "custom_call":
            target = operation.attributes["call_target_name"].value
            is_kernel = not target.startswith(("Sharding", "SPMD", "xla.sdy"))
            found[target] += is_kernel
        elif name in _SENDS:
            found["sent arrays"] += len(operation.operands)
        elif name in _WAITS:
            found["waits"] += 1
        elif name in _MOVES and _moves(operation, least):
            found[name] += 1
        for region in operation.regions:
            inside(region)

    def inside(region):
        for block in region.blocks:
            for inner in block.operations:
                count(inner.operation)

    if part is None:
        count(functions["main"].operation)
    else:
        inside(part)
    return +found


def of_branches(lowered, least: int) -> list[collections.Counter]:
    """Count what each branch of the first that a lowered program has starts."""

    def first(operation):
        if operation.name == "stablehlo.case":
            return operation
        inner = (
            first(x.operation)
            for region in operation.regions
            for block in region.blocks
            for x in block.operations
        )
        return next((x for x in inner if x is not None), None)

    found = (
        first(x.operation) for x in lowered.compiler_ir("stablehlo").body.operations
    )
    case = next(x for x in found if x is not None)
    return [of(lowered, least, branch) for branch in case.regions]


def outside_of_branches(lowered) -> collections.Counter:
    """Count the operations of a lowered program that no branch decides about."""
    module, found = lowered.compiler_ir("stablehlo"), collections.Counter()
    functions = {x.attributes["sym_name"].value: x for x in module.body.operations}

    def count(operation):
        name = operation.name.rpartition(".")[2]
        found[name] += 1
        if name == "call":
            count(functions[operation.attributes["callee"].value].operation)
        if name in _WAITS:
            return
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    count(inner.operation)

    count(functions["main"].operation)
    return found


def _moves(operation, least: int) -> bool:
    """Say whether an operation moves a part of an array, and how large a one."""
    shapes = [result.type.shape for result in operation.results]
    is_same = list(operation.operands[0].type.shape) == list(shapes[0])
    return not is_same and max(map(math.prod, shapes)) >= least
