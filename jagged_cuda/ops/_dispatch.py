"""How a call gets from a public function to its kernel.

``overridable``  is the gate of every public function: arguments that implement
                 __torch_function__ (torch.fx's proxies, subclasses) take the call whole; all others
                 must be of the kind that the function's annotations name (_arguments.py).
``call``         leads from a public function, or a gradient, to a registered operator: the short
                 way if nothing else wants to see the call, else through the dispatcher.
``register``     gives the dispatcher what an operator has beside its kernels: the fake kernel,
                 which its contract makes, autograd and autocast.

The short way: torch.library.register_autograd puts a Python kernel between the dispatcher and ours,
which costs more than half of what the host spends on a call. Calls on plain tensors go past it,
straight to the kernel, or through an autograd.Function of the same formula. Whatever else may want
to see the call takes the registered way: subclasses, modes, torch.func, autocast and tracing.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad as _forward_ad
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function

from jagged_cuda.ops._arguments import Arguments
from jagged_cuda.ops._contract import fake, operators

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


# --- the gate


def overridable(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Pass calls with arguments that implement __torch_function__ to them; check all others."""
    arguments = Arguments(function)
    takes_sequences = arguments.takes_sequences

    def careful(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        relevant: tuple[Any, ...] = ()
        if takes_sequences:
            relevant = tuple(_flat((*args, *kwargs.values())))
        if has_torch_function(relevant or args) or (
            kwargs and has_torch_function((*kwargs.values(),))
        ):
            relevant = relevant or (*args, *kwargs.values())
            try:
                result: _Result = handle_torch_function(public, relevant, *args, **kwargs)
            except Exception:
                # A subclass has refused the call; nested tensors do so without a helpful message.
                arguments.check(args, kwargs)
                raise
            return result
        arguments.check(args, kwargs)
        try:
            return function(*args, **kwargs)
        except NotImplementedError:  # a strided nested tensor is a plain Tensor to Python
            arguments.look_at_all(args, kwargs)
            raise

    public: Any = functools.update_wrapper(_past_the_gate(function, arguments, careful), function)

    def refuse_script() -> None:
        raise RuntimeError(
            f"{function.__name__}: torch.jit.script is not supported; use torch.export or"
            " torch.compile"
        )

    # What torch.jit.script calls first, also in a model that torch.fx has traced.
    public.__prepare_scriptable__ = refuse_script
    gated: Callable[_Arguments, _Result] = public
    return gated


def _past_the_gate(
    function: Callable[..., Any], arguments: Arguments, careful: Callable[..., Any]
) -> Callable[..., Any]:
    """`careful` with the function's own parameters; values of the usual kinds go straight past it.

    Written out for each function, as dataclasses write theirs: to pack arguments and to loop over
    them takes a tenth of a call. Of jagged_softmax it makes

        def jagged_softmax(x, offsets, *, scale=_default_scale):
            if type(x) in _types_x and type(offsets) in _types_offsets and (
                scale is _default_scale or type(scale) in _types_scale
            ) and not _has_mode():
                try:
                    return _function(x, offsets, scale=scale)
                except NotImplementedError:
                    pass
            return _careful(x, offsets, **({} if scale is _default_scale else {"scale": scale}))
    """
    scope: dict[str, Any] = {"_function": function, "_careful": careful}
    scope["_has_mode"] = getattr(torch._C, "_is_torch_function_mode_enabled", lambda: True)
    heads, tests, passed, given = [], [], [], []
    keyword = ""
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword:
            heads.append("*")
            keyword = "{0}="
        types, default = f"_types_{name}", f"_default_{name}"
        scope[types], scope[default] = arguments.by_name.get(name, ()), parameter.default
        is_usual = f"type({name}) in {types}"
        argument = keyword.format(name) + name
        passed.append(argument)
        if parameter.default is parameter.empty:
            heads.append(name)
            given.append(argument)
        elif type(parameter.default) is tuple:  # two ints; torch.compile takes no `is` of tuples
            heads.append(f"{name}={default}")
            is_usual = (
                f"type({name}) is tuple and len({name}) == 2"
                f" and type({name}[0]) is type({name}[1]) is int"
            )
            given.append(f"{name}={name}")
        else:
            heads.append(f"{name}={default}")
            is_usual = f"({name} is {default} or {is_usual})"
            given.append(f"**({{}} if {name} is {default} else {{{name!r}: {name}}})")
        tests.append(is_usual)
    source = f"""
def {function.__name__}({", ".join(heads)}):
    if {" and ".join(tests)} and not _has_mode():
        try:
            return _function({", ".join(passed)})
        except NotImplementedError:
            pass
    return _careful({", ".join(given)})
"""
    exec(source, scope)
    found: Callable[..., Any] = scope[function.__name__]
    return found


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """Values, and those in sequences among them."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def allow_tf32(dtype: torch.dtype) -> bool:
    """True if torch.backends.cuda.matmul.fp32_precision allows TF32 and the dtype is float32."""
    return dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


# What torch.compiler.assume_constant_result does: torch.compile takes the result as a constant. The
# decorator itself would import torch._dynamo, which takes over a second.
allow_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


# --- the call

# Inside the stable ABI a failed allocation loses its type: contract.h throws this text instead.
_OUT_OF_MEMORY = re.compile(r"^\w+: out of memory on cuda:(?P<device>\d+) allocating ")

_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_SCALARS = frozenset((int, float, bool, type(None)))

# Private functions of PyTorch: where one is missing, every call takes the registered way.
_PRIVATE = (
    "_are_functorch_transforms_active",
    "_dispatch_tls_is_dispatch_key_excluded",
    "_dispatch_tls_set_dispatch_key_excluded",
    "_functorch",
    "_is_any_autocast_enabled",
    "_is_torch_function_mode_enabled",
    "_is_tracing",
    "_len_torch_dispatch_stack",
)
_C: Any = torch._C
_HAS_PRIVATE = all(hasattr(_C, name) for name in _PRIVATE)
_has_transforms: Any = getattr(_C, _PRIVATE[0], None)
_is_excluded: Any = getattr(_C, _PRIVATE[1], None)
_set_excluded: Any = getattr(_C, _PRIVATE[2], None)

# For each operator, by its id (its hash is a function of Python's): its differentiable form, itself
# without the Python function that torch.ops puts before it, its arguments' defaults, and itself,
# which keeps the id.
_Formula = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], Callable[..., Any]]
_formulas: dict[int, _Formula] = {}
_REQUIRED = object()  # in the place of a default

_CPU, _CUDA = torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.AutogradCUDA


def call(op: Callable[..., Any], *args: Any) -> Any:
    """Return op(*args); out of memory on CUDA raises torch.OutOfMemoryError."""
    if is_compiling():
        return op(*args)
    try:
        if _forward_ad._current_level >= 0 or _has_transforms():
            _refuse_transforms(getattr(op, "__name__", str(op)).partition(".")[0], args)
            return op(*args)
        found = _formulas.get(id(op))
        if found is None or not _HAS_PRIVATE or _is_watched():
            return op(*args)
        asks_for_gradient = is_grad_enabled()
        wants_gradient = False
        for arg in args:
            kind = type(arg)
            if kind in _TENSORS:
                if asks_for_gradient and arg.requires_grad:
                    wants_gradient = True
            elif kind not in _SCALARS:
                return op(*args)
        apply, direct, defaults, _ = found
        passed = len(args)  # but for defaults at the end: PyTorch looks at each that is passed
        while args[passed - 1] is defaults[passed - 1]:
            passed -= 1
        args = args[:passed]
        return apply(*args) if wants_gradient else _below_autograd(direct, args)
    except RuntimeError as error:
        match = _OUT_OF_MEMORY.match(str(error))
        if match is None:
            raise
        figures = _allocator_figures(int(match["device"]))
        raise torch.OutOfMemoryError(f"CUDA {error}. {figures}") from None


def refuse_transforms(name: str, args: Sequence[Any]) -> None:
    """Raise RuntimeError where a transform would silently get wrong derivatives, or none.

    Functions that are made of operators ask first, so that the message has their own name.
    """
    if is_compiling():
        return
    if _forward_ad._current_level >= 0 or _has_transforms():
        _refuse_transforms(name, args)


def _below_autograd(op: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """op(*args) without its autograd kernel, on the device of the first argument.

    torch._C._AutoDispatchBelowAutograd excludes the keys of all devices, and takes five times as
    long as one key here. In inference mode the keys are excluded already, and must stay so.
    """
    first = args[0]
    if type(first) not in _TENSORS:  # then the dispatcher knows
        return op(*args)
    key = _CUDA if first.is_cuda else _CPU
    if _is_excluded(key):
        return op(*args)
    _set_excluded(key, True)
    try:
        return op(*args)
    finally:
        _set_excluded(key, False)


def _refuse_transforms(name: str, args: Sequence[Any]) -> None:
    transforms = {
        interpreter.key().name for interpreter in _C._functorch.get_interpreter_stack() or ()
    }
    tensors = [arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()]
    if not tensors:
        return
    if "Jvp" in transforms or any(_forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(
            f"{name}: forward-mode differentiation (torch.func.jvp, jacfwd, dual tensors) is not"
            " supported; use torch.autograd.grad"
        )
    if "Grad" in transforms:
        raise RuntimeError(
            f"{name}: torch.func.grad, vjp and jacrev are not supported; use torch.autograd.grad or"
            " torch.autograd.functional"
        )


def _is_watched() -> bool:
    """Whether something beside autograd and transforms wants to see calls."""
    return (
        _C._len_torch_dispatch_stack() > 0
        or _C._is_torch_function_mode_enabled()
        or _C._is_any_autocast_enabled()
        or _C._is_tracing()
    )


def _allocator_figures(device: int) -> str:
    figures = (
        *torch.cuda.mem_get_info(device),
        torch.cuda.memory_allocated(device),
        torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device),
    )
    free, total, allocated, unallocated = (
        f"{size_bytes / 2**20:.2f} MiB" for size_bytes in figures
    )
    return (
        f"GPU {device} has a total capacity of {total} of which {free} is free. Of the memory of"
        f" this process {allocated} is allocated by PyTorch, and {unallocated} is reserved by"
        " PyTorch but unallocated."
    )


# --- the registration

_LIBRARY = torch.library.Library("jagged_cuda", "IMPL")
_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def register(
    name: str,
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    autocast: Literal["lower_precision", "float32", "unchanged"] = "unchanged",
) -> None:
    """Register what torch.ops.jagged_cuda.<name> needs beside its kernels.

    Args:
        name: the operator, defined in csrc/contract/operators.h.
        setup_context, backward: its autograd formula. None for operators without one: then it is
            an error to differentiate them (autograd would only warn, and give wrong gradients).
        autocast: "lower_precision" casts floating tensors to torch.get_autocast_dtype, "float32"
            to float32, "unchanged" casts nothing.
    """
    if backward is None:

        def backward(ctx: Any, *grads: Tensor) -> None:
            raise RuntimeError(
                f"{name}: gradients of this operator (double backward) are not supported"
            )

    op = getattr(torch.ops.jagged_cuda, name).default
    torch.library.register_fake(op, fake(name))
    torch.library.register_autograd(op, backward, setup_context=setup_context)
    _add_formula(op, setup_context, backward)
    if autocast != "unchanged":
        for device_type in _AUTOCAST_KEYS:
            _register_autocast(name, device_type, autocast)


def _add_formula(
    op: torch._ops.OpOverload,
    setup_context: Callable[..., None] | None,
    backward: Callable[..., Any],
) -> None:
    direct = getattr(op, "_op", op)
    arguments = op._schema.arguments
    defaults = tuple(a.default_value if a.has_default_value() else _REQUIRED for a in arguments)

    def forward(ctx: Any, *args: Any) -> Any:
        output = _below_autograd(direct, args)
        if setup_context is not None:
            setup_context(ctx, args + defaults[len(args) :], output)
        return output

    name = op._schema.name.rpartition("::")[2]
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(name, (torch.autograd.Function,), members)
    # What a node of the graph calls, without the question which of two forms the formula has.
    if hasattr(function, "_backward_cls"):
        function._backward_cls.apply = backward
    # Function.apply, without what it does for torch.func.
    _formulas[id(op)] = super(torch.autograd.Function, function).apply, direct, defaults, op


def lower_precision(tensor: Tensor) -> Tensor:
    """What autocast, where it is on, makes of an operand of a "lower_precision" operator."""
    device_type = tensor.device.type
    if device_type not in _AUTOCAST_KEYS or not torch.is_autocast_enabled(device_type):
        return tensor
    cast: Tensor = _cast(tensor, device_type, torch.get_autocast_dtype(device_type))
    return cast


def _cast(arg: Any, device_type: str, dtype: torch.dtype) -> Any:
    if (
        isinstance(arg, Tensor)
        and arg.device.type == device_type
        and arg.is_floating_point()
        and arg.dtype is not torch.float64
    ):
        return arg.to(dtype)
    return arg


def _register_autocast(name: str, device_type: str, policy: str) -> None:
    op = getattr(torch.ops.jagged_cuda, name).default
    autocast_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | (
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    )

    # Arguments of the dtype of sums stay as they are.
    names, contract = operators()[name]
    sums = {rule.name for rule in contract.rules if rule.accumulates}
    casts = [argument not in sums for argument in names]

    def kernel(*args: Any) -> Any:
        lower = policy == "lower_precision"
        dtype = torch.get_autocast_dtype(device_type) if lower else torch.float32
        chosen = zip(args, casts, strict=False)
        with torch._C._ExcludeDispatchKeyGuard(autocast_keys):
            return op(*(_cast(a, device_type, dtype) if wanted else a for a, wanted in chosen))

    _LIBRARY.impl(name, kernel, _AUTOCAST_KEYS[device_type])
