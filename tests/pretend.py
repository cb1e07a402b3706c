"""A pretend accelerator: shows, on a machine without a GPU, mistakes that stop a script on one.

    python tests/pretend.py grpo.py --num_iterations 2
    python -m torch.distributed.run --nproc-per-node 2 tests/pretend.py grpo.py --num_iterations 2

torch keeps a device type, PrivateUse1, free for devices that it does not know. This file registers one there
under the name `pretend`. torch.accelerator finds it, so a script runs on it without a flag. Its memory is the
CPU's. Each operation runs on the CPU, over that memory and with the CPU's random numbers, so that a run gives
the numbers of --device cpu up to rounding. As with CUDA and NCCL, these are errors:

- tensors of two devices in one operation, other than a CPU tensor of no dimensions and CPU indices in x[i]
- a CPU generator for random numbers on the device
- .numpy() of a tensor on the device
- a CPU tensor in a collective

It cannot show what depends on hardware: speed, memory, NaN, other rounding, a missing type or operation.
All ranks share one device, and all_reduce is the only collective. torch.load to the device does not work, and
copy.deepcopy of a tensor there that is no parameter crashes. This file uses private interfaces of torch.
"""

import ctypes
import functools
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils import backend_registration
from torch.utils.dlpack import from_dlpack, to_dlpack

NAME = "pretend"
ON_CPU, ON_DEVICE = 1, 12  # kDLCPU, and kDLExtDev for PrivateUse1, in dlpack.h
INDEXING = ("aten::index", "aten::_index_put_impl_")  # x[i] and x[i] = y
# The operations that autocast runs in its type.
AUTOCAST = ["linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention"]

CPU_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
AUTOCAST_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

address_of = ctypes.pythonapi.PyCapsule_GetPointer
address_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
address_of.restype = ctypes.c_void_p


def is_ours(x):
    return isinstance(x, torch.Tensor) and x.device.type == NAME


def alias(x, kind):
    """A tensor over the memory of x on the other device."""
    capsule = to_dlpack(x)
    tensor = address_of(capsule, b"dltensor")  # a struct of a pointer of 8 bytes, the kind of device, ...
    ctypes.c_int32.from_address(tensor + 8).value = kind
    return from_dlpack(capsule)


def to_cpu(x, aliases):
    """The argument x for a CPU kernel. Adds (x, its alias) to aliases, and refuses what CUDA refuses."""
    if isinstance(x, list):
        return [to_cpu(y, aliases) for y in x]
    if isinstance(x, torch.device):
        return torch.device("cpu")
    if isinstance(x, torch.Generator):
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{x.device}'")
    if is_ours(x):
        # A kernel may enlarge an empty output, but not an alias.
        aliases.append((x, alias(x, ON_CPU) if x.numel() else torch.empty(x.shape, dtype=x.dtype)))
        return aliases[-1][1]
    if isinstance(x, torch.Tensor) and x.dim() > 0:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {NAME} and {x.device}")
    return x


def to_device(y, aliases):
    """The result of a CPU kernel on the device."""
    if isinstance(y, list | tuple):
        return type(y)(to_device(z, aliases) for z in y)
    if not isinstance(y, torch.Tensor):
        return y
    for x, cpu_x in aliases:
        if y is cpu_x:  # an operation in place returns its argument
            return x
    return alias(y, ON_DEVICE)


def run(op, *args, **kwargs):
    """The kernel of all operations on the device."""
    name = op._schema.name
    if op.is_view or name == "aten::set_":
        return op.redispatch(CPU_KERNELS, *args, **kwargs)  # it looks at sizes and not into the memory
    if name in INDEXING:
        indices = [None if index is None else index.to(NAME) for index in args[1]]  # x[:, i] has a None
        args = (args[0], indices, *args[2:])
    aliases = []
    cpu_args = [to_cpu(x, aliases) for x in args]
    cpu_kwargs = {key: to_cpu(x, aliases) for key, x in kwargs.items()}
    result = op(*cpu_args, **cpu_kwargs)
    for x, cpu_x in aliases:
        if x.shape != cpu_x.shape:  # it has been enlarged
            x.set_(alias(cpu_x, ON_DEVICE))
    return to_device(result, aliases)


def copy_from(source, target, non_blocking=False):
    """The kernel of copies from and to the device."""
    cpu_source, cpu_target = [alias(x, ON_CPU) if is_ours(x) else x for x in (source, target)]
    cpu_target.copy_(cpu_source)
    return target


def run_autocast(op, *args, **kwargs):
    """The kernel, within autocast, of the operations that run in its type."""
    dtype = torch.get_autocast_dtype(NAME)

    def cast(x):
        return x.to(dtype) if is_ours(x) and x.dtype == torch.float32 else x

    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEY):
        return op(*map(cast, args), **{key: cast(x) for key, x in kwargs.items()})


class Module(backend_registration._DummyBackendModule):
    """torch.pretend, the counterpart of torch.cuda."""

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


class Collectives(dist.ProcessGroup):
    """The counterpart of NCCL: sums with gloo over the same memory."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def allreduce(self, tensors, options):
        if not all(map(is_ours, tensors)):
            raise RuntimeError("No backend type associated with device type cpu")
        return self.gloo.allreduce([alias(x, ON_CPU) for x in tensors], options)


backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
dist.Backend.register_backend(NAME, Collectives, devices=[NAME])
# Otherwise Module.to makes new parameters and unties tied ones, which it does not do on CUDA.
torch.__future__.set_swap_module_params_on_conversion(True)

kernels = torch.library.Library("aten", "IMPL")
kernels.impl("_copy_from", copy_from, "PrivateUse1")
for name in AUTOCAST:
    op = getattr(torch.ops.aten, name).default
    kernels.impl(name, functools.partial(run_autocast, op), "AutocastPrivateUse1")
other_kernels = torch.library.Library("_", "IMPL")
other_kernels.fallback(run, "PrivateUse1")
other_kernels.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
