# Types of the C++ engine, see python/src. Not a public interface.

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

class RoundPipeError(RuntimeError): ...
class BudgetError(ValueError): ...
class DamagedCheckpointError(RoundPipeError): ...
class LayerTooLargeError(ValueError): ...
class HostTooSmallError(ValueError): ...

def require_engine() -> None: ...
def require_callers_thread() -> None: ...
def changed_fp16_accumulation(saved: bool, own: bool) -> str: ...

# Acquisitions by the engine since the process began; a layer's own code is not counted.
def interpreter_lock_acquisitions() -> int: ...

class MemoryStats:
    current_bytes: int
    peak_bytes: int
    limit_bytes: int

class MovedBytes:
    uploaded_bytes: int
    downloaded_bytes: int

# Totals of one class of completed transfers in one direction.
class LinkUse:
    direction: str
    kind: str
    transfers: int
    bytes: int
    queued_ms: float
    moving_ms: float

class Engine:
    @staticmethod
    def current() -> Engine: ...
    @staticmethod
    def set_current(devices: str | None, fp16_accumulation: bool | None = None) -> Engine: ...
    @staticmethod
    def shut_down() -> None: ...
    def __len__(self) -> int: ...
    def device_names(self) -> list[str]: ...
    def torch_devices(self) -> list[str]: ...
    @property
    def fp16_accumulation(self) -> bool: ...
    def memory_caps(self) -> list[int]: ...
    def memory(self, index: int) -> MemoryStats: ...
    def resident_bytes(self, index: int) -> int: ...
    def reset_peak_memory(self) -> None: ...
    def moved_bytes(self, index: int) -> MovedBytes: ...
    def device_rules(self, cap_bytes: int) -> DeviceRules: ...
    def smallest_cap_bytes(self) -> int: ...
    def link_use(self, index: int) -> list[LinkUse]: ...
    def failed(self) -> list[tuple[str, str]]: ...
    def restore(self) -> list[str]: ...
    def inject(self, index: int, fault: str) -> None: ...
    def release_hangs(self) -> None: ...
    def hangs(self, index: int) -> bool: ...

def device_names(devices: str) -> list[str]: ...
def parse_bytes(text: str) -> int: ...
def checks_losses() -> bool: ...
def format_bytes(size_bytes: int) -> str: ...
def map_file(path: str) -> torch.Tensor: ...
def free_host_bytes() -> int: ...
def is_mapped(tensor: torch.Tensor) -> bool: ...
def settled_bytes(tensor: torch.Tensor) -> int: ...

# Whether both hold the very same objects, under the very same keys, in the same order.
def same_items(a: dict[str, Any], b: dict[str, Any]) -> bool: ...

# Whether all modules still hold the very same objects. snapshots: for each module a copy of its __dict__, then one of
# its dicts and a copy of that dict, and so on.
def modules_unchanged(modules: list[nn.Module], snapshots: list[tuple[dict[str, Any], ...]]) -> bool: ...

class HostArenaStats:
    asked_bytes: int
    reserved_bytes: int
    locked_bytes: int
    pieces: int

def host_arena() -> HostArenaStats: ...

class PlanMode:
    INFERENCE: PlanMode
    TRAIN: PlanMode
    FUSED: PlanMode

class Range:
    def __init__(self, first: int, last: int) -> None: ...
    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...

class Job:
    @property
    def order(self) -> float: ...
    @property
    def phase(self) -> str: ...
    @property
    def layers(self) -> Range: ...
    @property
    def microbatches(self) -> Range: ...
    @property
    def device(self) -> int: ...

class Plan:
    first_backward_layer: int
    def __init__(
        self,
        layers: int,
        microbatches: int,
        devices: int,
        first_backward_layer: int,
        jobs: list[tuple[str, int, int, int, int, int, float]],
    ) -> None: ...
    @property
    def layers(self) -> int: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def devices(self) -> int: ...
    @property
    def jobs(self) -> list[Job]: ...

# How one tensor of a batch is cut; as made, automatically.
class Cut:
    def __init__(self) -> None: ...
    @staticmethod
    def along(dimension: int) -> Cut: ...
    @staticmethod
    def whole() -> Cut: ...

class BatchRole:
    ARGUMENT: BatchRole
    KEYWORD: BatchRole
    LABEL: BatchRole

# One value among the inputs or the labels of a call; not a tensor if `ready` (microbatches) or `numbers` is set.
class BatchLeaf:
    def __init__(
        self,
        name: str,
        shape: list[int] = ...,
        cut: Cut = ...,
        role: BatchRole = ...,
        ready: int = 0,
        ready_rows: list[int] = ...,
        numbers: int = 0,
    ) -> None: ...

# Where a leaf is cut; dimension -1: every microbatch gets it whole.
class LeafCut:
    dimension: int
    sizes: list[int]

class InputCut:
    def __init__(self, leaves: list[BatchLeaf]) -> None: ...
    def count(self, wanted: int | None, by_default: int) -> int: ...
    def cut(self, count: int) -> list[LeafCut]: ...
    def rows(self, count: int) -> list[int] | None: ...
    def doubts(self) -> str: ...

def rows_of(microbatches: list[list[BatchLeaf]]) -> list[int] | None: ...
def cut_labels(labels: list[BatchLeaf], rows: list[int] | None, count: int) -> list[LeafCut]: ...

class Stages:
    forward: list[Range]
    backward: list[Range]
    def __init__(self) -> None: ...

class LayerCost:
    forward_ms: float
    backward_ms: float
    recompute_ms: float | None
    weight_bytes: int
    gradient_bytes: int
    activation_bytes: int
    saved_bytes: int
    trained: bool
    @property
    def updated_bytes(self) -> int: ...
    def __init__(
        self,
        *,
        forward_ms: float,
        backward_ms: float,
        recompute_ms: float | None = None,
        weight_bytes: int = 0,
        gradient_bytes: int = 0,
        activation_bytes: int = 0,
        saved_bytes: int = 0,
        trained: bool = True,
        frozen_bytes: int = 0,
    ) -> None: ...

class LayerWork:
    product_operations: float
    attention_operations: float
    element_bytes: float
    products: float
    attentions: float
    element_kernels: float
    def __init__(
        self,
        *,
        product_operations: float = 0.0,
        attention_operations: float = 0.0,
        element_bytes: float = 0.0,
        products: float = 0.0,
        attentions: float = 0.0,
        element_kernels: float = 0.0,
    ) -> None: ...
    def __add__(self, other: LayerWork) -> LayerWork: ...
    def __sub__(self, other: LayerWork) -> LayerWork: ...

class Card:
    product_tflops: float
    attention_tflops: float
    memory_gb_per_s: float
    launch_us: float
    def __init__(
        self,
        *,
        product_tflops: float = 0.0,
        attention_tflops: float = 0.0,
        memory_gb_per_s: float = 0.0,
        launch_us: float = 0.0,
    ) -> None: ...

def time_ms(work: LayerWork, card: Card) -> float: ...
def gradient_sums(gradient_bytes: int) -> LayerWork: ...

class Cluster:
    def __init__(
        self,
        *,
        devices: list[tuple[float, int]],
        link_up_gb_per_s: float = 0.0,
        link_down_gb_per_s: float = 0.0,
        host_gb_per_s: float = 0.0,
        hop_latency_ms: float = 0.0,
        resident_bytes: int = 0,
    ) -> None: ...
    def __len__(self) -> int: ...

class TimingRules:
    def __init__(
        self,
        *,
        asynchronous: bool = True,
        hop_on_same_device: bool = False,
        late_recompute: bool = False,
    ) -> None: ...

class CutStage:
    layers: Range
    replicas: int

class PlanChoice:
    cut: str
    stages: Stages
    forward: list[CutStage]
    backward: list[CutStage]
    interleave: float
    recipe: Plan
    step_ms: float
    work_ms: float
    bubble: float
    traffic: float
    limit: str

SEARCH_EFFORT: int

def may_keep_layers(devices: int, gradient_groups: int) -> bool: ...
def search(
    costs: list[LayerCost],
    cluster: Cluster,
    *,
    microbatches: int,
    mode: PlanMode = ...,
    rules: TimingRules = ...,
    first_backward_layer: int = 0,
    max_traffic: float = 0.0,
    replicas: bool = True,
    gradient_groups: int = 0,
    interleave: bool = True,
    max_fused_layers: int = 1,
    single_backward_layers: bool = False,
    max_waiting_bytes: int = 0,
    effort: int = ...,
    seed: int = ...,
    over_links: bool = False,
    chunk_bytes: int = 64_000_000,
    priorities: bool = True,
    update_gb_per_s: float = 0.0,
    update_traffic: float = 0.0,
) -> list[PlanChoice]: ...
def place_over_links(
    recipe: Plan, costs: list[LayerCost], cluster: Cluster, *, rules: TimingRules = ..., steps: int = 1
) -> list[Plan]: ...

class Placer:
    def __init__(self, recipe: Plan, costs: list[LayerCost], cluster: Cluster, rules: TimingRules) -> None: ...
    def next(self) -> Plan: ...

def pace_ms(ends_ms: list[float]) -> float: ...
def traffic_ratio(plan: Plan, costs: list[LayerCost]) -> float: ...

class Baseline:
    GPIPE: Baseline
    ONE_FORWARD_ONE_BACK: Baseline
    INTERLEAVED: Baseline
    LOOPED_BFS: Baseline
    PUBLISHED: Baseline

class BaselineSizes:
    pipeline: list[int]
    chunks: list[int]
    forward: list[int]
    backward: list[int]
    def __init__(self) -> None: ...

def default_sizes(costs: list[LayerCost], devices: int) -> BaselineSizes: ...
def baseline_plan(
    baseline: Baseline, sizes: BaselineSizes, layers: int, devices: int, microbatches: int, first_device: int = 0
) -> Plan: ...

# One microbatch of one job of one step.
class TimelineEvent:
    step: int
    job: int
    microbatch: int
    device: int
    phase: str
    start_ms: float
    end_ms: float
    recompute_ms: float

class Timeline:
    makespan_ms: float
    steady_step_ms: float
    bubble: float
    steady_bubble: float
    events: list[TimelineEvent]

# One chunk of a transfer.
class TransferEvent:
    step: int
    job: int
    device: int
    up: bool
    kind: str
    start_ms: float
    end_ms: float

class LinkTimeline:
    timeline: Timeline
    transfers: list[TransferEvent]
    network_busy_ms: float

def simulate_links(
    plans: list[Plan],
    costs: list[LayerCost],
    cluster: Cluster,
    *,
    rules: TimingRules = ...,
    chunk_bytes: int = 64_000_000,
    priorities: bool = True,
    update_gb_per_s: float = 0.0,
    update_traffic: float = 0.0,
    nodes: int = 1,
    network_gb_per_s: float = 0.0,
    network_latency_ms: float = 0.0,
    clipped: bool = False,
) -> LinkTimeline: ...
def simulate(plans: list[Plan], costs: list[LayerCost], cluster: Cluster, rules: TimingRules = ...) -> Timeline: ...

class MemoryMeter:
    def __enter__(self) -> MemoryMeter: ...
    def __exit__(self, *error: object) -> None: ...
    @property
    def current_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    def reset_peak(self) -> None: ...

class TiedGradAccumulation:
    LAYER: TiedGradAccumulation
    MICROBATCH: TiedGradAccumulation

class RunOptions:
    requires_grad: bool | None
    preserve_rng_state: bool
    fault_tolerant: bool
    verify_every: int
    recompute_grain: RecomputeGrain
    tied_grad_accumulation: TiedGradAccumulation
    gradient_groups: int
    route: Stages | Plan | None
    def __init__(self) -> None: ...

def default_microbatches(devices: int) -> int: ...

class Event:
    def __init__(self) -> None: ...
    def fire(self) -> None: ...
    def wait(self) -> None: ...

# One execution of a stage on a microbatch.
class Record:
    phase: str
    layers: Range
    microbatch: int
    device: int
    start_ms: float
    end_ms: float
    # When the recompute of a backward ended; 0 for other phases.
    recomputed_ms: float
    # How long the device then was idle, until the gradient arrived.
    waited_ms: float

class ExecutionLog:
    def records(self) -> list[Record]: ...

class RecomputeGrain:
    STAGE: RecomputeGrain
    LAYER: RecomputeGrain

# One layer's own bytes: in a weight slot, of its gradients in flight, of their sums on the device, and of gradients
# that are rounded into separate memory before they go.
class LayerBytes:
    weights: int
    gradients: int
    sums: int
    rounded: int
    @property
    def frozen_bytes(self) -> int: ...
    def __init__(self, weights: int, gradients: int, sums: int, rounded: int) -> None: ...

# Bytes that one layer takes on a device for one microbatch, see simulate/memory_simulator.h.
class LayerFootprint:
    inputs: int
    outputs: int
    output_gradients: int
    forward: int
    saved: int
    backward: int
    def __init__(
        self, inputs: int, outputs: int, output_gradients: int, forward: int, saved: int, backward: int
    ) -> None: ...
    def scaled(self, rows: int, measured_rows: int) -> LayerFootprint: ...
    def kept_bytes(self, grain: RecomputeGrain) -> int: ...

class StepSizes:
    def __init__(
        self,
        layers: Sequence[LayerBytes],
        footprints: Sequence[LayerFootprint],
        grain: RecomputeGrain,
        label_bytes: int,
        gradient_groups: int,
    ) -> None: ...

class DeviceMemory:
    weights: int
    gradients: int
    values: int
    work: int
    resident: int

class DeviceRules:
    cap_bytes: int
    waits: bool
    most_resident_bytes: int
    def __init__(self, cap_bytes: int) -> None: ...

STAGED_MICROBATCHES: int

def layer_bytes(tensors: list[torch.Tensor], tied: list[bool]) -> LayerBytes: ...
def predict_device(plans: Sequence[Plan], sizes: StepSizes, rules: DeviceRules) -> DeviceMemory: ...
def predict_devices(plans: Sequence[Plan], sizes: StepSizes, cap_bytes: Sequence[int]) -> list[DeviceMemory]: ...
def largest_stage_bytes(plans: Sequence[Plan], sizes: StepSizes) -> int: ...
def waiting_on_host(plan: Plan, footprints: Sequence[LayerFootprint], microbatches: int) -> int: ...
def partial_sum_bytes(plan: Plan, sizes: StepSizes) -> int: ...

class OptimizerMemory:
    def __init__(self, algorithm: Algorithm, options: Hyperparameters, moments: MomentFormat) -> None: ...
    @property
    def algorithm(self) -> Algorithm: ...
    @property
    def options(self) -> Hyperparameters: ...
    @property
    def moments(self) -> MomentFormat: ...

def least_optimizer() -> OptimizerMemory: ...
def largest_optimizer(
    algorithm: Algorithm, groups: Sequence[Hyperparameters], moments: MomentFormat
) -> OptimizerMemory: ...

class HostPrediction:
    weights: int
    gradients: int
    masters: int
    moments: int
    values: int
    partial_sums: int
    kept_for_failures: int
    def __init__(
        self,
        weights: int,
        gradients: int,
        masters: int,
        moments: int,
        values: int = 0,
        partial_sums: int = 0,
        kept_for_failures: int = 0,
    ) -> None: ...
    @property
    def total(self) -> int: ...
    def rows(self) -> dict[str, int]: ...

def predict_host(
    blocks: Sequence[Sequence[torch.Tensor]],
    optimizer: OptimizerMemory,
    trains: bool = True,
    wider_gradients: int = 0,
    values: int = 0,
    partial_sums: int = 0,
) -> HostPrediction: ...
def require_host(
    where: str,
    name: str,
    budget_bytes: int,
    predict: Callable[[OptimizerMemory], HostPrediction],
    optimizer: OptimizerMemory | None,
) -> None: ...
def tied_sum_bytes(parameter: torch.Tensor, layers: int) -> int: ...

class LinkRates:
    up_gb_per_s: float
    down_gb_per_s: float

class MeasuredMachine:
    # Speed and memory in bytes of each.
    devices: list[tuple[float, int]]
    links: list[LinkRates]
    link_up_gb_per_s: float
    link_down_gb_per_s: float
    host_gb_per_s: float
    hop_latency_ms: float
    update_gb_per_s: float
    chunk_bytes: int
    priorities: bool

class MeasuredStep:
    microbatches: int
    start_ms: float
    end_ms: float
    busy_ms: float

class LossScale:
    def __init__(self, first: torch.Tensor) -> None: ...
    def use(self) -> torch.Tensor: ...
    def next(self) -> torch.Tensor: ...
    def of_step(self, pipelines: list[Pipeline], several_nodes: bool) -> torch.Tensor | None: ...
    def belong_to(self, pipelines: list[Pipeline]) -> None: ...
    def has_stepped(self, pipeline: Pipeline) -> bool: ...
    def stepped(self, pipelines: list[Pipeline]) -> None: ...
    def stepped_outside(self, losses: int) -> None: ...
    def outside_losses(self) -> int: ...
    def set_next(self, scale: torch.Tensor) -> None: ...
    def set_next_unless_waiting(self, pipelines: list[Pipeline], scale: torch.Tensor) -> None: ...
    def restart(self, scale: torch.Tensor) -> None: ...
    def waiting_or_next(self) -> torch.Tensor: ...
    @staticmethod
    def after_step(
        before: torch.Tensor, after: torch.Tensor, used: torch.Tensor, backoff_factor: float
    ) -> torch.Tensor: ...

class SkippedSteps:
    def __init__(self, before: int = 0) -> None: ...
    def add(self, step: int, skipped: bool, scale: float) -> None: ...
    @property
    def count(self) -> int: ...

class Front:
    def __init__(self, pipeline: Pipeline) -> None: ...

class StepClaim:
    def __init__(self, model: str, parameters: Sequence[tuple[str, torch.Tensor]]) -> None: ...

def any_claimed(parameters: Sequence[torch.Tensor]) -> bool: ...

class FunctionRun:
    def wait(self) -> None: ...
    def result(self) -> bool: ...

def after_step_functions(function: Callable[[], bool]) -> FunctionRun: ...
def wait_step_functions() -> None: ...
def require_no_step_function() -> None: ...

class CopySteps:
    def __init__(self, models: Sequence[Pipeline], host_parameters: Sequence[torch.Tensor]) -> None: ...
    def set_copies(self, sources: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None: ...
    @property
    def has_copies(self) -> bool: ...
    def publish_written_copies(self) -> None: ...
    def publish_copies(self) -> None: ...
    def take_writes(self) -> None: ...
    def prepare_step(self, asynchronous: bool) -> None: ...
    def queue_step(self, function: Callable[[], None]) -> None: ...
    def settle_step(self) -> None: ...
    def finish_update(self) -> None: ...
    def keep_for(self, wait_read: Callable[[], None]) -> None: ...
    def synchronize(self) -> None: ...
    def show_weights(self) -> None: ...
    def hand_over(self) -> None: ...
    def changed_from_outside(self) -> None: ...
    def clear_gradients(self, set_to_none: bool) -> None: ...
    @property
    def has_landed_gradients(self) -> bool: ...
    @property
    def unpublished(self) -> bool: ...
    def accept_loaded(self, unpublished: bool) -> None: ...

class CallArguments:
    def __init__(
        self,
        inputs: list[Any],
        labels: list[Any],
        loss: Any,
        changeable: bool,
        savers: Sequence[str],
        passages: Sequence[Passage | None],
    ) -> None: ...

class CallResult:
    losses: list[torch.Tensor]
    outputs: list[tuple[list[torch.Tensor], Any]]

class Activations:
    DEVICE: Activations
    HOST: Activations
    RECOMPUTE: Activations

class MemoryPrediction:
    device: DeviceMemory
    measured_bytes: int | None
    host: HostPrediction
    recompute_grain: RecomputeGrain
    activations: list[Activations]
    def text(self) -> str: ...

class PendingCall:
    def finish(self) -> CallResult: ...
    def records(self) -> list[Record]: ...

class ModelCore:
    def __init__(
        self,
        pipeline: Pipeline,
        host_memory: int | None,
        device_memory: int | None,
        measures: bool,
        checks_loss: bool,
    ) -> None: ...
    def forward(self, arguments: CallArguments, options: RunOptions) -> list[tuple[list[torch.Tensor], Any]]: ...
    def submit(
        self, arguments: CallArguments, options: RunOptions, keep_outputs: bool, refuses_nan_early: bool
    ) -> PendingCall: ...
    def predict_memory(self, arguments: CallArguments, options: RunOptions) -> MemoryPrediction: ...
    def last_prediction(self) -> MemoryPrediction | None: ...
    def footprints(self, arguments: CallArguments, options: RunOptions) -> list[LayerFootprint]: ...
    def fits(self, arguments: CallArguments, options: RunOptions) -> bool: ...
    def count_optimizer(self, memory: OptimizerMemory) -> None: ...

class Pipeline:
    asynchronous: bool
    calls: int
    random_seed: int
    def __init__(self, name: str, layers: list[Any], pinned: bool, in_place_of: Pipeline | None = None) -> None: ...
    def release(self) -> None: ...
    def loss_scales(self) -> list[LossScale]: ...
    def has_loss_scale(self, scale: LossScale) -> bool: ...
    def wait_losses(self) -> None: ...
    def planned_stages(self, mode: PlanMode, microbatches: int) -> Stages: ...
    def costs(self) -> list[LayerCost]: ...
    def knows_costs(self) -> bool: ...
    def machine(self) -> MeasuredMachine: ...
    def measured_steps(self) -> list[MeasuredStep]: ...
    def planned(self, plan: Plan) -> bool: ...
    def notation(self, plan: Plan) -> str: ...
    def predicted_ms(self, microbatches: int, gradient_groups: int, scale: float) -> float: ...
    def last_step_plan(self) -> Plan | None: ...
    def last_step_groups(self) -> int: ...
    def preview_plans(
        self,
        route: Stages | Plan | None,
        mode: PlanMode,
        microbatches: int,
        gradient_groups: int,
        recompute_grain: RecomputeGrain,
        steps: int,
    ) -> list[Plan]: ...
    def layer_bytes(self) -> list[LayerBytes]: ...
    def partial_sum_bytes(
        self, plan: Plan, gradient_groups: int, tied_grad_accumulation: TiedGradAccumulation
    ) -> int: ...
    def raise_pending(self) -> None: ...
    def drain(self) -> None: ...
    def drop_gradients(self) -> None: ...
    def weights_read_by_calls(self) -> list[list[torch.Tensor]]: ...
    def wait_buffers(self) -> None: ...
    def summed_gradients(self) -> list[list[torch.Tensor | None]]: ...
    def load_gradients(self, gradients: list[list[torch.Tensor | None]]) -> None: ...
    def keep_gradients_in_fp32(self) -> None: ...
    def adopt_replaced(self) -> None: ...
    def show_weights(self) -> None: ...
    def show_newest_weights(self) -> bool: ...
    def expose(self) -> None: ...
    def show_gradients(self) -> None: ...
    @property
    def has_gradients(self) -> bool: ...
    exposes_gradients: bool
    def stage_limit_bytes(self, limit_bytes: int) -> int: ...
    def block_parameters(self) -> list[list[torch.nn.Parameter]]: ...
    def host_bytes(self) -> int: ...
    def verified_jobs(self) -> int: ...
    def last_plan(self) -> Plan | None: ...
    def last_log(self) -> ExecutionLog: ...
    @property
    def kept_calls(self) -> int: ...
    # Of the latest calls, oldest first; as many as are kept.
    def recent_logs(self) -> list[ExecutionLog]: ...
    def last_records(self) -> list[Record]: ...

class StepOptions:
    @property
    def asynchronous(self) -> bool: ...
    @property
    def max_grad_norm(self) -> float | None: ...
    gradient_factor: float | None
    def __init__(self, asynchronous: bool, max_grad_norm: float | None) -> None: ...

class StepRun:
    finished: bool
    norm: float
    overflowed: bool
    updated_blocks: int
    abandoned_blocks: int
    def wait_decided(self) -> None: ...
    def wait_finished(self) -> None: ...

class HostBytes:
    # Number of trained parameters.
    parameters: int
    weights_and_gradients: int
    masters: int
    moments: int

class Nodes:
    def __init__(self, gradients: str, weights: str, timeout_s: float) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @staticmethod
    def drain_all() -> None: ...

class ModelOptimizer:
    def __init__(
        self,
        pipelines: list[Pipeline],
        groups: list[list[list[int]]],
        algorithm: Algorithm,
        format: MomentFormat,
        nodes: Nodes | None = None,
    ) -> None: ...
    def step(
        self,
        groups: list[Hyperparameters],
        options: StepOptions,
        loss_scale: float,
    ) -> StepRun: ...
    def shard(self, block: int) -> list[tuple[int, int]]: ...
    def make_room(self) -> None: ...
    def finish(self) -> None: ...
    def accept_weights(self) -> None: ...
    def load_next_weights(self, block: int) -> list[torch.Tensor]: ...
    def state(self, block: int, parameter: int) -> ParameterState: ...
    def remainder(self, block: int, parameter: int) -> torch.Tensor | None: ...
    def restart_master(self, block: int, parameter: int, weights: torch.Tensor) -> None: ...
    def host_bytes(self, groups: list[Hyperparameters]) -> HostBytes: ...

def host_parameters(name: str, names: list[str], tensors: list[torch.Tensor]) -> Pipeline: ...
def set_saved_by_call(saved: dict[int, Any]) -> None: ...
def layer_seed(base_seed: int, model_name: str, call: int, microbatch: int, layer: int) -> int: ...
def backward_seed(forward_seed: int) -> int: ...

class DrawsApart:
    def __init__(self, seed: int, device: torch.device) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

def own_generator(device: torch.device) -> torch.Generator | None: ...
def make_stand_in(made: torch.Generator, standard: torch.Generator) -> None: ...

class Algorithm:
    ADAM: Algorithm
    ADAMW: Algorithm
    SGD: Algorithm
    ADAGRAD: Algorithm
    ADADELTA: Algorithm
    ADAMAX: Algorithm
    NADAM: Algorithm
    RADAM: Algorithm
    RMSPROP: Algorithm
    RPROP: Algorithm
    ASGD: Algorithm
    ADAFACTOR: Algorithm
    LION: Algorithm

class MomentFormat:
    FLOAT32: MomentFormat
    BLOCKWISE_8BIT: MomentFormat

class Hyperparameters:
    lr: float
    beta1: float
    beta2: float
    eps: float
    eps2: float
    weight_decay: float
    momentum: float
    dampening: float
    alpha: float
    rho: float
    lr_decay: float
    momentum_decay: float
    lambd: float
    t0: float
    eta_minus: float
    eta_plus: float
    step_size_min: float
    step_size_max: float
    beta2_decay: float
    clip_threshold: float
    initial_accumulator_value: float
    nesterov: bool
    amsgrad: bool
    maximize: bool
    centered: bool
    decoupled_weight_decay: bool
    def __init__(self, other: Hyperparameters = ...) -> None: ...

class Scalars:
    step: float
    mu_product: float
    eta: float
    mu: float
    def __init__(self) -> None: ...

class ParameterState:
    scalars: Scalars
    tensors: list[torch.Tensor]
    def __init__(self, scalars: Scalars, tensors: list[torch.Tensor]) -> None: ...

def has_weight_decay(name: str, classes: list[str]) -> bool: ...
def state_names(
    algorithm: Algorithm, hyper: Hyperparameters, format: MomentFormat, sizes: tuple[int, ...]
) -> list[str]: ...
def make_state(
    algorithm: Algorithm, hyper: Hyperparameters, format: MomentFormat, parameter: torch.Tensor
) -> ParameterState: ...
def state_bytes(algorithm: Algorithm, hyper: Hyperparameters, format: MomentFormat, sizes: tuple[int, ...]) -> int: ...
def update_traffic(
    algorithm: Algorithm, hyper: Hyperparameters, format: MomentFormat, weights: torch.dtype
) -> float: ...
def update(
    algorithm: Algorithm,
    hyper: Hyperparameters,
    format: MomentFormat,
    state: ParameterState,
    before: torch.Tensor,
    after: torch.Tensor,
    remainder: torch.Tensor | None,
    master: torch.Tensor | None,
    gradient: torch.Tensor,
    inverse_scale: float = 1.0,
    clip: float = 1.0,
) -> None: ...
def sum_of_squares(gradient: torch.Tensor, inverse_scale: float = 1.0) -> float: ...
def split(master: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None: ...
def join(weight: torch.Tensor, remainder: torch.Tensor, master: torch.Tensor) -> None: ...
def set_threads(threads: int, pinned: bool = False) -> None: ...
def threads() -> int: ...
def instruction_sets() -> list[str]: ...
def instruction_set() -> str: ...
def set_instruction_set(name: str) -> None: ...

class LogitStepKind:
    MULTIPLY: LogitStepKind
    DIVIDE: LogitStepKind
    TANH: LogitStepKind
    FLOAT32: LogitStepKind

class LogitStep:
    def __init__(self, kind: LogitStepKind, value: float = ...) -> None: ...
    @property
    def kind(self) -> LogitStepKind: ...
    @property
    def value(self) -> float: ...

QUERIES_AT_ONCE: int

# The documents of each row, see roundpipe/ops/documents.h.
class Documents:
    @property
    def window(self) -> int: ...
    @property
    def rows(self) -> list[list[int]]: ...
    def with_window(self, window: int) -> Documents: ...
    def has_inner_padding(self) -> bool: ...

def find_documents(
    attention_mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    rows: int,
    tokens: int,
    labels: torch.Tensor | None = ...,
) -> Documents: ...
def read_documents(table: torch.Tensor, positions: torch.Tensor | None, rows: int, tokens: int) -> Documents: ...

# [rows, tokens, heads, width]
def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    queries_at_once: int,
) -> torch.Tensor: ...

class MoeConfig:
    def __init__(
        self, *, top_k: int, shares: str, activation: str | None, clamped: tuple[float, float] | None
    ) -> None: ...

class DecoderConfig:
    def __init__(
        self,
        *,
        head_dim: int,
        scaling: float,
        input_norm_eps: float,
        post_norm_eps: float,
        query_norm_eps: float,
        key_norm_eps: float,
        scales_norms_in_float: bool,
        attention_dropout: float,
        training: bool,
        activation: str | None,
        moe: MoeConfig | None,
        lora: Sequence[tuple[float, float, bool] | None],  # as ADAPTABLE: scaling, dropout, training
        arithmetic: Arithmetic,
    ) -> None: ...

# The arguments are places among the tensors that reach the layer; so are the outputs, or RESULT or ROUTER_LOGITS.
class DecoderCall:
    def __init__(
        self,
        hidden: int,
        cos: int,
        sin: int,
        mask: int | None,
        positions: int | None,
        attention: str,
        experts: str | None,
        mlp_chunk_tokens: int,
        outputs: Sequence[int],
        inputs: int,
    ) -> None: ...

class EmbeddingConfig:
    def __init__(
        self, *, padding_index: int, rotary_scaling: float, rotary_halves: bool, arithmetic: Arithmetic
    ) -> None: ...

# As DecoderCall; it hands on EMBEDDED, then what is kept.
class EmbeddingCall:
    def __init__(
        self,
        ids: int,
        attention_mask: int | None,
        positions: int | None,
        kept: Sequence[int],
        attention: str,
        inputs: int,
    ) -> None: ...

class HeadConfig:
    def __init__(self, *, norm_eps: float, scales_norm_in_float: bool, arithmetic: Arithmetic) -> None: ...

class HeadCall:
    def __init__(
        self,
        hidden: int,
        labels: int | None,
        items: int | None,
        share: float | None,
        gives_logits: bool,
        chunk_tokens: int | None,
        chunk_logit_bytes: int,
        inputs: int,
    ) -> None: ...

ADAPTABLE: list[str]
EMBEDDED: list[int]  # places of the hidden states, cosines, sines, mask and positions
RESULT: int
ROUTER_LOGITS: int

class Passage:
    def __init__(
        self,
        calls: Sequence[DecoderCall | None],
        structure_after: Callable[[int], Any],
        embedding: EmbeddingCall | None,
        head: HeadCall | None,
    ) -> None: ...
    def with_documents(self, whole: Documents | None, of_calls: Sequence[Documents | None]) -> Passage: ...

def embed(
    config: EmbeddingConfig,
    call: EmbeddingCall,
    weight: torch.Tensor,
    frequencies: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    documents: Documents,
) -> list[torch.Tensor]: ...
def apply_head(
    config: HeadConfig,
    call: HeadCall,
    norm: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    inputs: Sequence[torch.Tensor],
) -> list[torch.Tensor]: ...
def exact_parts(config: DecoderConfig, names: Sequence[str], weights: Sequence[torch.Tensor]) -> str: ...
def decode(
    config: DecoderConfig,
    names: Sequence[str],
    weights: Sequence[torch.Tensor],
    hidden: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mask: torch.Tensor | None,
    attention: str,
    mlp_chunk_tokens: int = ...,
    positions: torch.Tensor | None = ...,
    experts: str | None = ...,
) -> torch.Tensor: ...

class LinearCrossEntropyOptions:
    ignore_index: int
    chunk_tokens: int
    chunk_logit_bytes: int
    steps: list[LogitStep]
    arithmetic: Arithmetic
    def __init__(self) -> None: ...

Arithmetic: TypeAlias = Literal["exact", "fast"]
DEFAULT_ARITHMETIC: Arithmetic

def check_arithmetic(name: str) -> None: ...

OptionValue: TypeAlias = bool | int | float | str | list[str] | None

class TrainingOption:
    @property
    def name(self) -> str: ...
    @property
    def help(self) -> str: ...
    @property
    def otherwise(self) -> OptionValue: ...
    @property
    def choices(self) -> list[str]: ...
    @property
    def of_a_machine(self) -> bool: ...

def training_options() -> list[TrainingOption]: ...
def check_training_options(values: Mapping[str, OptionValue]) -> None: ...
def fixed_training_options(values: Mapping[str, OptionValue]) -> dict[str, OptionValue]: ...
def trains_adapters(values: Mapping[str, OptionValue]) -> bool: ...
def highest_learning_rate(values: Mapping[str, OptionValue]) -> float: ...
def learning_rate(values: Mapping[str, OptionValue], steps: int) -> Callable[[int], float]: ...
def tokens_of_step(values: Mapping[str, OptionValue]) -> int: ...
def changed_arithmetic(saved: str | None, own: str, model: str) -> str: ...
def card_source() -> str: ...
def card_program(architecture: str) -> bytes: ...
def why_no_kernels(device: str) -> str: ...
def chunk_logit_bytes(device: str) -> int: ...
def kept_chunks(is_said: bool, saved: int | None, own: int | None, model: str) -> tuple[int, str] | None: ...
def softcap_steps(cap: float) -> list[LogitStep]: ...
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    options: LinearCrossEntropyOptions,
) -> torch.Tensor: ...

class ChunkedMapOptions:
    chunk_tokens: int
    dim: int
    preserve_rng_state: bool
    def __init__(self) -> None: ...

def chunked_map(
    body: Callable[[torch.Tensor], torch.Tensor],
    input: torch.Tensor,
    parameters: list[torch.Tensor],
    options: ChunkedMapOptions,
) -> torch.Tensor: ...

class Projection:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None: ...

def gated_mlp(
    input: torch.Tensor, gate: Projection, up: Projection, down: Projection, activation: str, chunk_tokens: int
) -> torch.Tensor: ...
def two_layer_mlp(
    input: torch.Tensor, up: Projection, down: Projection, activation: str, chunk_tokens: int
) -> torch.Tensor: ...

# -- checkpoints on disk: roundpipe/checkpoint ------------------------------------------------------------------------

class FileRecord:
    name: str
    bytes: int
    crc32c: int

class Manifest:
    step: int
    files: list[FileRecord]
    writer: dict[str, str]
    nodes: int
    format: str

def read_manifest(folder: str) -> Manifest: ...
def parse_manifest(text: str | bytes, where: str) -> Manifest: ...

# The offset counts from the file's first byte.
class TensorEntry:
    name: str
    dtype: str
    shape: list[int]
    offset: int
    bytes: int

class SafetensorsHeader:
    tensors: list[TensorEntry]
    metadata: dict[str, str]

def read_safetensors_header(path: str) -> SafetensorsHeader: ...
def parse_safetensors_header(start: bytes, file_bytes: int, where: str) -> SafetensorsHeader: ...

class FileProblem:
    file: str
    problem: str

# progress: called with the bytes read so far, and all; what it raises ends the verification.
def verify_step(
    folder: str, threads: int = 4, progress: Callable[[int, int], object] | None = None
) -> list[FileProblem]: ...
def crc32c(data: bytes, seed: int = 0) -> int: ...

# problem: "" where the checkpoint is complete
class FoundStep:
    step: int
    folder: str
    problem: str

def require_complete(folder: str) -> Manifest: ...
def find_steps(run_folder: str) -> list[FoundStep]: ...
def complete_steps(run_folder: str) -> list[int]: ...
def latest_step(run_folder: str) -> int | None: ...

# text: a JSON object in one line
class JournalRecord:
    step: int
    text: str

class JournalContents:
    records: list[JournalRecord]
    notice: str
    whole_bytes: int

def read_journal(run_folder: str, after_step: int = -1) -> JournalContents: ...

class Journal:
    notice: str
    def recorded(self, step: int) -> str | None: ...
    def last_recorded(self) -> int | None: ...
    def append(self, step: int, text: str) -> None: ...
    def rewind(self, step: int) -> None: ...

# notices: what could not be removed
class Pruned:
    removed: list[int]
    notices: list[str]

# Holds the folder's lock, and so does its journal.
class RunFolder:
    path: str
    notices: list[str]
    def __init__(self, folder: str) -> None: ...
    def open_journal(self, after_step: int) -> Journal: ...
    def steps(self) -> list[int]: ...
    def latest(self) -> int | None: ...
    def prune(self, keep_last: int, keep_every: int = 0, newest: int | None = None) -> Pruned: ...

# -- the state of a training: roundpipe/saving ----------------------------------------------------------------------

class SnapshotMemory:
    def __init__(self, limit_bytes: int) -> None: ...
    def try_take(self, bytes: int) -> bool: ...

class Snapshot:
    @staticmethod
    def of(optimizer: ModelOptimizer, memory: SnapshotMemory, with_weights: bool) -> Snapshot: ...
    def cancel(self) -> None: ...

# A value as JSON, whose tensors the encoder has.
class EncodedValue: ...

class StateEncoder:
    def encode(self, value: object, path: str, copies: bool = True) -> EncodedValue: ...

# What one of `size` processes writes of a checkpoint.
class Contents:
    encoder: StateEncoder
    own_encoder: StateEncoder
    def __init__(self, rank: int, size: int, is_adapter: bool) -> None: ...
    # values: in another dtype, those of the tensor that is written
    def add(self, section: str, name: str, tensor: torch.Tensor, values: torch.Tensor | None = None) -> None: ...
    def add_file(self, name: str, text: str) -> None: ...
    def set_states(self, common: dict[str, Any], own: dict[str, Any]) -> None: ...
    # places: block, parameter, its name, that in weight files, and the names of its moments
    def set_snapshot(self, snapshot: Snapshot, places: list[tuple[int, int, str, str, list[str]]]) -> None: ...
    def take_snapshot(self) -> tuple[EncodedValue, EncodedValue]: ...
    def plain_bytes(self) -> int: ...
    def copy_plain(self) -> None: ...
    def buffer_fingerprints(self) -> dict[str, int]: ...
    def leave_out_buffers(self, of_first_rank: dict[str, int]) -> None: ...

# agree: calls what it is given on each rank, and returns what that has returned, by rank
class SaveWork:
    step: int
    folder: str
    done: bool
    def __init__(
        self,
        path: str,
        run: RunFolder | None,
        contents: Contents,
        memory: SnapshotMemory,
        step: int,
        overwrite: bool,
        keep_last: int | None,
        keep_every: int,
        is_loud: bool,
        agree: Callable[[Callable[[], str]], list[str]] | None,
    ) -> None: ...
    def start(self, finish: Callable[[], None], caller_seconds: float) -> None: ...
    def wait(self) -> tuple[int, float, float, float, float, int]: ...
    def wait_read(self) -> None: ...
    def wait_over(self) -> None: ...

def run_folder(folder: str) -> RunFolder: ...
def real_path(folder: str) -> str: ...
def wait_for_saves(folder: str) -> None: ...

# -- checkpoints as they are loaded: roundpipe/runs ------------------------------------------------------------------

class StoredTensor:
    file: str
    torch_dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: int

# rank: -1 for what is not of one of several nodes
class StoredCheckpoint:
    def __init__(self, folder: str, weights_only: bool = False) -> None: ...
    @property
    def manifest(self) -> Manifest: ...
    def state_text(self, rank: int = -1) -> str: ...
    def sections(self, rank: int = -1) -> dict[str, dict[str, StoredTensor]]: ...
    def value(self, keys: list[str | int], path: str, rank: int = -1) -> Any: ...
    def fingerprint(self, keys: list[str | int], rank: int = -1) -> int: ...
    def read_files(self, destinations: list[tuple[str, str, torch.Tensor]]) -> None: ...
    # by section
    def read(self, destinations: dict[str, list[tuple[str, torch.Tensor]]]) -> None: ...
    optimizer_keys: list[str]
    def shape(self, name: str) -> list[int]: ...
    def require_whole(self, sections: list[str]) -> None: ...
    def verify_rest(self, rank: int = 0, size: int = 1) -> None: ...

class ModelNames:
    def __init__(
        self,
        parameters: list[tuple[str, torch.Tensor]],
        buffers: list[tuple[str, torch.Tensor]],
        outside: set[str],
        in_file: dict[str, str],
    ) -> None: ...

class WeightPlaces:
    # section and name in the files, by the name in the model
    sources: dict[str, tuple[str, str]]
    missing: list[str]
    unexpected: list[str]
    def __init__(self, stored: StoredCheckpoint, names: ModelNames) -> None: ...
    def check(self, names: ModelNames, strict: bool) -> None: ...
    def load(self, except_for: set[str] = ..., beside: dict[str, list[tuple[str, torch.Tensor]]] = ...) -> None: ...

# range: of elements; None for all
class StateReads:
    whole_tensors: list[tuple[str, torch.Tensor]]
    def __init__(self, stored: StoredCheckpoint) -> None: ...
    def take(
        self, name: str, kind: str, target: torch.Tensor, like: torch.Tensor, range: tuple[int, int] | None
    ) -> None: ...
    def whole(self, name: str, kind: str, shape: Sequence[int]) -> torch.Tensor: ...
    def read(self) -> None: ...

def load_fused(
    stored: StoredCheckpoint,
    names: ModelNames,
    places: WeightPlaces,
    optimizer: ModelOptimizer,
    algorithm: Algorithm,
    moments: MomentFormat,
    options: list[Hyperparameters],
    is_shared: bool,
) -> None: ...

class FallBack:
    def __init__(self, folder: str) -> None: ...
    def next(self) -> tuple[str, list[str]]: ...
    def damaged(self, problem: str) -> None: ...

def sampled_checksum(tensor: torch.Tensor) -> str: ...
def checkpoints_in(folder: str) -> list[str]: ...
def latest(folder: str) -> str | None: ...
