"""DistributedSampler divides the images, and set_epoch gives every epoch another order.

python docs/examples/shuffle_and_set_epoch.py
"""

from torch.utils.data import DataLoader, DistributedSampler


def make_loader(dataset, batch_size, rank, world_size):
    """Returns a loader of this rank's part, without shuffle=True: the sampler shuffles."""
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, seed=0)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


loader = make_loader(range(8), batch_size=4, rank=0, world_size=2)
try:
    DataLoader(loader.dataset, sampler=loader.sampler, shuffle=True)
except ValueError as error:
    print("ValueError:", error)
without = [batch.tolist() for epoch in range(2) for batch in loader]
orders = []
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    orders += [batch.tolist() for batch in loader]
print(f"without set_epoch: {without}, with set_epoch: {orders}")
assert without[0] == without[1] and orders[0] != orders[1]
