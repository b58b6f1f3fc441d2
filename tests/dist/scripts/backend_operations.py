"""Every operation of the argosy backend, against Gloo in the same process: `backend_operations.py RANK WORLD PORT`."""

import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import argosy

rank, world, port = (int(word) for word in sys.argv[1:])
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]
BY_GLOO_TOO = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
BITWISE = [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]


def values(dtype, *shape, salt=0):
    """Other numbers on each rank, small enough for every type to sum and multiply them."""
    rng = torch.Generator().manual_seed(100 * rank + salt)
    if dtype is torch.bool:
        return torch.rand(*shape, generator=rng) < 0.5
    if dtype.is_complex:
        return torch.randn(*shape, dtype=dtype, generator=rng)
    if dtype.is_floating_point:
        return torch.randn(*shape, generator=rng).to(dtype)
    return torch.randint(0, 4, shape, generator=rng).to(dtype)


def all_reduce(group, dtype, shape=(7, 3), op=ReduceOp.SUM, start=False):
    tensor = values(dtype, *shape)
    work = dist.all_reduce(tensor, op, group=group, async_op=start)
    if start:
        assert work.wait()
        assert work.is_completed()
    return [tensor]


def all_reduce_in_pieces(group, dtype):
    first, second = values(dtype, 5), values(dtype, 2, 2, salt=1)
    with dist._coalescing_manager(group=group):
        dist.all_reduce(first, group=group)
        dist.all_reduce(second, group=group)
    third = [values(dtype, 4, salt=2), values(dtype, 1, salt=3)]
    future = dist.all_reduce_coalesced(third, group=group, async_op=True)
    future.wait()
    return [first, second, *third]


def broadcast(group, dtype):
    tensors = [values(dtype, 6, salt=root) for root in range(world)]
    for root, tensor in enumerate(tensors):
        dist.broadcast(tensor, group_src=root, group=group)
    return tensors


def reduce(group, dtype):
    tensors = [values(dtype, 6, salt=root) for root in range(world)]
    for root, tensor in enumerate(tensors):
        dist.reduce(tensor, group_dst=root, group=group)
    return [tensors[rank]]


def all_gather(group, dtype, shape=(2, 3), start=False):
    places = [values(dtype, *shape, salt=9) for _ in range(world)]
    work = dist.all_gather(places, values(dtype, *shape), group=group, async_op=start)
    if start:
        work.wait()
    return places


def all_gather_into_tensor(group, dtype):
    flat, stacked = values(dtype, 4 * world), values(dtype, 2 * world, 2)
    dist.all_gather_into_tensor(flat, values(dtype, 4), group=group)
    dist.all_gather_into_tensor(stacked, values(dtype, 2, 2), group=group, async_op=True).wait()
    first, second = values(dtype, 2 * world), values(dtype, 3 * world)
    with dist._coalescing_manager(group=group):
        dist.all_gather_into_tensor(first, values(dtype, 2), group=group)
        dist.all_gather_into_tensor(second, values(dtype, 3), group=group)
    return [flat, stacked, first, second]


def all_gather_coalesced(group, dtype):
    places = [[values(dtype, 2), values(dtype, 3, 1)] for _ in range(world)]
    dist.all_gather_coalesced(places, [values(dtype, 2, salt=1), values(dtype, 3, 1, salt=2)], group=group)
    return [tensor for each in places for tensor in each]


def reduce_scatter(group, dtype, op=ReduceOp.SUM):
    place = values(dtype, 5)
    dist.reduce_scatter(place, [values(dtype, 5, salt=salt) for salt in range(world)], op, group=group)
    return [place]


def reduce_scatter_tensor(group, dtype, op=ReduceOp.SUM):
    place, other = values(dtype, 5), values(dtype, 1, 2)
    dist.reduce_scatter_tensor(place, values(dtype, 5 * world), op, group=group)
    dist.reduce_scatter_tensor(other, values(dtype, world, 2), op, group=group, async_op=True).wait()
    first, second = values(dtype, 2), values(dtype, 3)
    with dist._coalescing_manager(group=group):
        dist.reduce_scatter_tensor(first, values(dtype, 2 * world), op, group=group)
        dist.reduce_scatter_tensor(second, values(dtype, 3 * world), op, group=group)
    return [place, other, first, second]


def gather(group, dtype):
    root = world - 1
    places = [values(dtype, 3, salt=9) for _ in range(world)] if rank == root else None
    tensor, into = values(dtype, 3), places
    if dtype.is_complex and dist.get_backend(group) == "gloo":  # which does not know them
        tensor, into = torch.view_as_real(tensor), places and [torch.view_as_real(place) for place in places]
    dist.gather(tensor, into, group_dst=root, group=group)
    return places or []


def scatter(group, dtype):
    root, place = world - 1, values(dtype, 3)
    parts = [values(dtype, 3, salt=salt) for salt in range(world)] if rank == root else None
    dist.scatter(place, parts, group_src=root, group=group)
    return [place]


def all_to_all(group, dtype):
    places = [values(dtype, 3) for _ in range(world)]
    dist.all_to_all(places, [values(dtype, 3, salt=to) for to in range(world)], group=group)
    # From rank a to rank b go a + 2 b elements, and none at all from 0 to 0. In lists, Gloo wants equal parts.
    uneven = [values(dtype, source + 2 * rank) for source in range(world)]
    gives = [values(dtype, rank + 2 * to, salt=to) for to in range(world)]
    if dist.get_backend(group) == "gloo":
        flat = torch.cat(uneven)
        sizes = [[part.numel() for part in parts] for parts in (uneven, gives)]
        dist.all_to_all_single(flat, torch.cat(gives), *sizes, group=group)
        uneven = list(flat.split(sizes[0]))
    else:
        dist.all_to_all(uneven, gives, group=group)
    return places + uneven


def all_to_all_single(group, dtype):
    even = values(dtype, 2 * world, 3)
    dist.all_to_all_single(even, values(dtype, 2 * world, 3, salt=1), group=group)
    gets, gives = [source + 2 * rank for source in range(world)], [rank + 2 * to for to in range(world)]
    uneven = values(dtype, sum(gets), 2)
    source = values(dtype, sum(gives), 2, salt=1)
    dist.all_to_all_single(uneven, source, gets, gives, group=group, async_op=True).wait()
    return [even, uneven]


def send_and_receive(group, dtype):
    """Around in a ring, one rank at a time."""
    place = values(dtype, 4)
    if rank == 0:
        dist.send(place, group_dst=(rank + 1) % world, group=group, tag=3)
        dist.recv(place, group_src=(rank - 1) % world, group=group, tag=3)
    else:
        mine = place.clone()
        dist.recv(place, group_src=(rank - 1) % world, group=group, tag=3)
        dist.send(mine, group_dst=(rank + 1) % world, group=group, tag=3)
    return [place]


def messages_in_any_order(group, dtype):
    """All ranks receive before they send, and tags keep messages apart."""
    before, after = (rank - 1) % world, (rank + 1) % world
    places = [values(dtype, 1000), values(dtype, 3)]
    receives = [dist.irecv(place, group_src=before, group=group, tag=tag) for tag, place in enumerate(places)]
    sends = [dist.isend(values(dtype, 3, salt=1), group_dst=after, group=group, tag=1)]
    sends += [dist.isend(values(dtype, 1000, salt=2), group_dst=after, group=group, tag=0)]
    for work in [*receives, *sends]:
        work.wait()
    return places


def batch(group, dtype):
    """As pipelines do: all neighbours at once, far more than fits between them."""
    before, after = (rank - 1) % world, (rank + 1) % world
    places = [values(dtype, 100_000, salt=5), values(dtype, 7, salt=5)]
    gives = [values(dtype, 100_000, salt=1), values(dtype, 7, salt=2)]
    operations = [
        dist.P2POp(dist.isend, gives[0], group_peer=after, group=group),
        dist.P2POp(dist.irecv, places[0], group_peer=before, group=group),
    ]
    if world > 2:
        operations += [
            dist.P2POp(dist.irecv, places[1], group_peer=after, group=group),
            dist.P2POp(dist.isend, gives[1], group_peer=before, group=group),
        ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return places


def receive_from_anybody(group, dtype):
    if rank:
        dist.send(torch.full((2,), rank).to(dtype), group_dst=0, group=group)
        return []
    places = [values(dtype, 2) for _ in range(world - 1)]
    sources = [dist.recv(place, group=group) for place in places]
    assert sorted(sources) == list(range(1, world)), sources
    for source, place in zip(sources, places, strict=True):
        assert torch.equal(place, torch.full((2,), source).to(dtype)), (source, place)
    return []


def views(group, dtype):
    """Tensors with gaps, transposed, and without a dimension. (Gloo writes into the gaps, so it gets copies.)"""
    base = values(dtype, 6, 4)
    gaps, between = base[:, ::2], base[:, 1::2]
    tensors = [gaps, values(dtype, 6, 4)[1:5, ::2], values(dtype, 3, 4).t(), values(dtype, 1)[0]]
    sent, places = values(dtype, 4, 4).t(), [values(dtype, 4, 6)[:, ::2] for _ in range(world)]
    if dist.get_backend(group) == "gloo":
        tensors, places, sent = [t.contiguous() for t in tensors], [t.contiguous() for t in places], sent.contiguous()
    for number, tensor in enumerate(tensors):
        work = dist.all_reduce(tensor, group=group, async_op=number % 2 == 1)
        if work:
            work.wait()
    assert torch.equal(between, values(dtype, 6, 4)[:, 1::2])
    dist.broadcast(sent, group_src=0, group=group)
    dist.all_gather(places, values(dtype, 3, 4).t(), group=group)
    return [*tensors, sent, *places]


def empty(group, dtype):
    tensor = values(dtype, 0, 3)
    dist.all_reduce(tensor, group=group)
    dist.broadcast(tensor, group_src=0, group=group)
    dist.all_gather([torch.empty_like(tensor) for _ in range(world)], tensor, group=group)
    flat = values(dtype, 0)
    dist.all_gather_into_tensor(values(dtype, 0), flat, group=group)
    dist.reduce_scatter_tensor(values(dtype, 0), flat, group=group)
    dist.all_to_all_single(values(dtype, 0), flat, group=group)
    return [tensor]


def objects(group, dtype):
    gathered = [None] * world
    dist.all_gather_object(gathered, {"rank": rank, "type": dtype}, group=group)
    assert gathered == [{"rank": each, "type": dtype} for each in range(world)], gathered
    told = [f"from {rank}", rank]
    dist.broadcast_object_list(told, group_src=1 % world, group=group)
    assert told == [f"from {1 % world}", 1 % world], told
    mine = [None]
    dist.scatter_object_list(mine, [f"for {each}" for each in range(world)], group_src=0, group=group)
    assert mine == [f"for {rank}"], mine
    collected = [None] * world if rank == 0 else None
    dist.gather_object((rank, "x" * 1000 * rank), collected, group_dst=0, group=group)
    assert rank or collected == [(each, "x" * 1000 * each) for each in range(world)]
    if rank == 0:
        dist.send_object_list([1, {"a": 2}], group_dst=world - 1, group=group)
    if rank == world - 1:
        received = [None, None]
        dist.recv_object_list(received, group_src=0, group=group)
        assert received == [1, {"a": 2}]
    return []


EVERY = [
    all_reduce,
    all_reduce_in_pieces,
    broadcast,
    reduce,
    all_gather,
    all_gather_into_tensor,
    all_gather_coalesced,
    reduce_scatter,
    reduce_scatter_tensor,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
    send_and_receive,
    messages_in_any_order,
    batch,
    receive_from_anybody,
    views,
    empty,
]


def check(what, results, expected):
    """The same bits where both add in the same order: two ranks, or no fractions; else to rounding."""
    assert len(results) == len(expected), what
    for result, reference in zip(results, expected, strict=True):
        assert result.shape == reference.shape, what
        if world == 2 or not (result.is_floating_point() or result.is_complex()):
            assert torch.equal(result, reference), f"{what}: {result} is not {reference}"
        else:
            tolerance = {torch.bfloat16: 0.02, torch.float16: 0.003}.get(result.dtype, 1e-6)
            close = torch.allclose(result, reference, rtol=tolerance, atol=tolerance)
            assert close, f"{what}: {result} is not near {reference}"


def compare(what, operation, ours, gloo, *arguments):
    results = operation(ours, *arguments)
    check(what, results, operation(gloo, *arguments))


def reductions(ours, gloo):
    for dtype in DTYPES:
        ops = [] if dtype.is_complex or dtype is torch.bool else BY_GLOO_TOO
        ops = ops if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool else [*ops, *BITWISE]
        for op in ops:
            compare(f"all_reduce {op} of {dtype}", all_reduce, ours, gloo, dtype, (33,), op, True)
            compare(f"all_reduce {op} of {dtype}", all_reduce, ours, gloo, dtype, (2, 5), op)
    for dtype in (torch.float32, torch.float64):
        for operation in (all_reduce, reduce_scatter, reduce_scatter_tensor):
            arguments = (dtype, (33,), ReduceOp.AVG) if operation is all_reduce else (dtype, ReduceOp.AVG)
            compare(f"{operation.__name__} AVG of {dtype}", operation, ours, gloo, *arguments)
    scaled = values(torch.float32, 9)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5), group=ours)
    total = values(torch.float32, 9)
    dist.all_reduce(total, group=ours)
    torch.testing.assert_close(scaled, total / 2)
    small = torch.tensor([rank, 1, 0]).to(torch.int16)  # which Gloo does not take
    dist.all_reduce(small, ReduceOp.MAX, group=ours)
    assert small.tolist() == [world - 1, 1, 0]
    truths = torch.tensor([rank == 0, True, False])
    for op, expected in [(ReduceOp.SUM, [True, True, False]), (ReduceOp.MIN, [world == 1, True, False])]:
        mine = truths.clone()
        dist.all_reduce(mine, op, group=ours)
        assert mine.tolist() == expected


def subgroups():
    """Two groups at once, whose ranks are numbered anew, and a group of one."""
    for backend in ("argosy", None):
        evens = dist.new_group(range(0, world, 2), backend=backend)
        odds = dist.new_group(range(1, world, 2), backend=backend)
        mine, members = (evens, range(0, world, 2)) if rank % 2 == 0 else (odds, range(1, world, 2))
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total, group=mine)
        assert total.item() == sum(member + 1 for member in members)
        told = torch.tensor([rank])
        dist.broadcast(told, src=members[-1], group=mine)
        assert told.item() == members[-1]
    alone = [dist.new_group([each], backend="argosy") for each in range(world)][rank]
    tensor, place = torch.tensor([5.0]), torch.zeros(1)
    dist.all_reduce(tensor, group=alone)
    dist.all_gather_into_tensor(place, tensor, group=alone)
    dist.barrier(group=alone)
    assert (tensor.item(), place.item()) == (5.0, 5.0)


def futures(group):
    """What DDP and its hooks use."""
    tensor = torch.ones(3) * rank
    doubled = dist.all_reduce(tensor, group=group, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    assert doubled.wait().tolist() == [world * (world - 1.0)] * 3


warnings.simplefilter("ignore")
argosy.register_backend()
argosy.register_backend()
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("argosy", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))
ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
assert dist.get_backend() == "argosy"
assert (ours.rank(), ours.size(), ours.name()) == (rank, world, "argosy")
for dtype in DTYPES if world < 4 else DTYPES[:1]:  # types differ in nothing that depends on the number of ranks
    for operation in EVERY:
        compare(f"{operation.__name__} of {dtype}", operation, ours, gloo, dtype)
objects(ours, torch.float32)
reductions(ours, gloo)
compare("a large all_reduce", all_reduce, ours, gloo, torch.float32, (700, 1001))
compare("a large all_gather", all_gather, ours, gloo, torch.float32, (700, 301), True)
subgroups()
futures(ours)
dist.barrier()
dist.barrier(async_op=True).wait()
ours.monitored_barrier(timedelta(seconds=20))
dist.destroy_process_group()
print("done", rank)
