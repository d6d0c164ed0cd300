"""The names in a checkpoint begin with `module.` or `_orig_mod.`: how to load it all the same.

python docs/examples/checkpoint_names.py
"""

import copy

from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present


def load_weights(model, state):
    """Loads weights that were saved from the bare model, from DDP, or from a compiled model."""
    state = copy.copy(state)  # keeps the versions of the modules, which a dict() would lose
    for prefix in ("_orig_mod.", "module.", "_orig_mod."):  # torch.compile outside, or inside
        consume_prefix_in_state_dict_if_present(state, prefix)
    model.load_state_dict(state)


model = nn.Linear(2, 1)
wrapped = nn.DataParallel(model).state_dict()  # DDP gives the same names.
compiled = {f"_orig_mod.{name}": tensor for name, tensor in wrapped.items()}
for state in (model.state_dict(), wrapped, compiled):
    print(list(state))
    other = nn.Linear(2, 1)
    load_weights(other, state)
    assert other.weight.equal(model.weight)
nothing = model.load_state_dict(wrapped, strict=False)
assert nothing.missing_keys == ["weight", "bias"]  # so it has loaded nothing
