"""What the DDP scripts should compute, written down once more for one process."""

import copy

import torch
import torch.nn.functional as F


def shards(count, world_size, seed, epoch):
    """The training images of each rank in an epoch: one shared order, dealt out in turn."""
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(count, generator=generator).tolist()
    order += order[: -count % world_size]  # the first images again, for shards of equal length
    return [order[rank::world_size] for rank in range(world_size)]


def train(checkpoint, images, labels, world_size, epochs, batch_size, seed=0, lr=0.1):
    """Trains one more epoch from a checkpoint, with the gradients of world_size shards averaged.

    Args:
        checkpoint: dict with the untrained or saved "model" (state dict and module under "module"),
            "optimizer" state or None, and "epoch", the number of epochs finished.
        images: uint8 (N, 1, 28, 28). labels: int64 (N,).
        epochs: of the whole run, which the learning rate's schedule spans.

    Returns (state dict of rank 0's model after the epoch, mean loss of all ranks' images before
    the steps, percentage of them that was classified correctly).
    """
    epoch = checkpoint["epoch"]
    ranks = [copy.deepcopy(checkpoint["module"]) for _ in range(world_size)]
    optimizers = [
        torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=5e-4, nesterov=True)
        for model in ranks
    ]
    for model, optimizer in zip(ranks, optimizers, strict=True):
        model.train()
        if checkpoint["optimizer"]:
            optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))
    dealt = shards(len(images), world_size, seed, epoch)
    steps = -(-len(dealt[0]) // batch_size)
    loss_sum = correct = count = 0
    for step in range(steps):
        for model, shard in zip(ranks, dealt, strict=True):
            batch = shard[step * batch_size : (step + 1) * batch_size]
            model.zero_grad()
            logits = model(images[batch].float() / 127.5 - 1)
            loss = F.cross_entropy(logits, labels[batch])
            loss.backward()
            loss_sum += loss.item() * len(batch)
            correct += (logits.argmax(1) == labels[batch]).sum().item()
            count += len(batch)
        done = (epoch + (step + 0.5) / steps) / epochs
        now = lr * world_size * batch_size / 64 * min(done / 0.2, (1 - done) / 0.8)
        for same in zip(*(model.parameters() for model in ranks), strict=True):
            mean = torch.stack([parameter.grad for parameter in same]).mean(0)
            for parameter in same:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = now
            optimizer.step()
    return ranks[0].state_dict(), loss_sum / count, 100 * correct / count
