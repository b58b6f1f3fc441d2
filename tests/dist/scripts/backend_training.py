"""torch's own ways to train, on argosy and on Gloo: `backend_training.py RANK WORLD PORT` compares what they learn."""

import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import argosy
from argosy.parallel.sharding.fully import shard_modules

rank, world, port = (int(word) for word in sys.argv[1:])
STEPS = 3


class Net(nn.Module):
    """Two layers, one that is used only by rank 0 in even steps, and normalisation with buffers."""

    def __init__(self, optional=False):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 16), nn.Linear(16, 4), nn.BatchNorm1d(16)
        self.optional = nn.Linear(16, 16) if optional else None
        self.step = 0

    def forward(self, x):
        hidden = self.norm(self.first(x).relu())
        if self.optional is not None and (self.step % 2 == 0 and rank == 0):
            hidden = hidden + self.optional(hidden)
        self.step += 1
        return self.second(hidden)


def data(step):
    rng = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(12, 8, generator=rng), torch.randn(12, 4, generator=rng)


def train(model, parameters=None):
    """Train a little and return the losses."""
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, y = data(step)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def ddp(group, **options):
    torch.manual_seed(rank)  # DDP makes them equal
    model = DistributedDataParallel(Net(options.get("find_unused_parameters", False)), process_group=group, **options)
    losses = train(model)
    return [*losses, *(each.detach() for each in model.parameters()), *model.buffers()]


def ddp_with_hook(group):
    """A communication hook in Python, as gradient compression uses them."""

    def halved(_, bucket):
        future = dist.all_reduce(bucket.buffer().div_(world), group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=group)
    model.register_comm_hook(None, halved)
    return [*train(model), *(each.detach() for each in model.parameters())]


def ddp_with_power_sgd(group):
    """Its callbacks start further operations and wait for their futures."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=group)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2, random_seed=0)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model)


def fsdp(group):
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(group, "cpu")
    model = nn.Sequential(nn.Linear(8, 17), nn.ReLU(), nn.Linear(17, 4))  # of sizes that do not divide
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = train(model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in state.values()]
    return [*losses, *whole]


def fsdp_in_shared_memory(group):
    """Argosy's exchange, where workers share memory. More modules are asked for ahead than it has buffers for."""
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    model = nn.Sequential(nn.Linear(8, 17), *(nn.Linear(17, 17) for _ in range(6)), nn.Linear(17, 4))
    shard_modules(dict(model.named_children()) | {"": model}, mesh, keep_gathered=False, offload=False)
    model.set_modules_to_forward_prefetch(list(model))
    losses = train(model)
    return [*losses, *(each.full_tensor().detach() for each in model.parameters())]


def tensor_parallel(group):
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(group, "cpu")
    model = nn.Sequential(nn.Linear(8, 4 * world), nn.ReLU(), nn.Linear(4 * world, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rng = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        loss = model(torch.randn(6, 8, generator=rng)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [loss.detach(), *(each.full_tensor().detach() for each in model.parameters())]


def redistribute(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    rows = distribute_tensor(torch.arange(6.0 * 10).view(6, 10), mesh, [Shard(0)])
    columns = rows.redistribute(placements=[Shard(1)])
    product = columns @ columns.t()  # a partial sum on each rank
    return [columns.to_local(), product.redistribute(placements=[Replicate()]).to_local(), rows.full_tensor()]


def pipeline(group, schedule):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(world)]
    stage = PipelineStage(layers[rank], rank, world, torch.device("cpu"), group=group)
    run = schedule(stage, n_microbatches=2 * world, loss_fn=nn.functional.mse_loss)
    x, y = (torch.randn(4 * world, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    losses = []
    for _ in range(2):
        layers[rank].zero_grad()
        output = run.step(*([x] if rank == 0 else []), target=y, losses=losses if rank == world - 1 else None)
    gradients = [each.grad for each in layers[rank].parameters()]
    return [*gradients, *(loss.detach() for loss in losses), *([output.detach()] if rank == world - 1 else [])]


def compare(name, function, *arguments, exact=world == 2, **options):
    results, expected = (function(group, *arguments, **options) for group in (ours, gloo))
    assert len(results) == len(expected) > 0
    for number, (result, reference) in enumerate(zip(results, expected, strict=True)):
        same = torch.equal(result, reference)
        if not exact:
            same = torch.allclose(result, reference, rtol=1e-5, atol=1e-6)
        assert same, f"{name}: result {number} is {result}, and on Gloo {reference}"
    if rank == 0:
        print(name, flush=True)


warnings.simplefilter("ignore")
torch.set_num_threads(1)
argosy.register_backend()
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("argosy", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))
ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
compare("ddp", ddp)
compare("ddp with unused parameters", ddp, find_unused_parameters=True)
compare("ddp with views", ddp, gradient_as_bucket_view=True, bucket_cap_mb=0.0005)
compare("ddp with a static graph", ddp, static_graph=True)
compare("ddp with a hook", ddp_with_hook)
compare("ddp with powerSGD", ddp_with_power_sgd, exact=False)
compare("fsdp", fsdp)
compare("fsdp in shared memory", fsdp_in_shared_memory)
compare("tensor parallel", tensor_parallel)
compare("redistribute", redistribute)
compare("gpipe", pipeline, ScheduleGPipe, exact=True)
compare("1f1b", pipeline, Schedule1F1B, exact=True)
dist.destroy_process_group()
print("done", rank)
