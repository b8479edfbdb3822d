#include <roundpipe/compare/baselines.h>
#include <roundpipe/schedule/moved_bytes.h>
#include <roundpipe/schedule/search.h>
#include <roundpipe/simulate/card.h>
#include <roundpipe/simulate/link_search.h>

#include <pybind11/operators.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;
using namespace compare;   // NOLINT: this file binds these namespaces
using namespace schedule;  // NOLINT
using namespace simulate;  // NOLINT

void bind_schedule(py::module_& module) {
  py::enum_<PlanMode>(module, "PlanMode")
      .value("INFERENCE", PlanMode::kInference)
      .value("TRAIN", PlanMode::kTrain)
      .value("FUSED", PlanMode::kFused);
  py::class_<Range>(module, "Range")
      .def(py::init([](int first, int last) { return Range{first, last}; }), py::arg("first"), py::arg("last"))
      .def_readonly("first", &Range::first)
      .def_readonly("last", &Range::last)
      .def("__repr__", [](const Range& range) { return to_string(range); });
  ValueClass<Job>(module, "Job")
      .attribute("phase", [](const Job& job) { return phase_name(job.phase); })
      .attribute("layers", &Job::layers)
      .attribute("microbatches", &Job::microbatches)
      .attribute("device", &Job::device)
      .attribute("order", &Job::order);
  py::class_<Plan>(module, "Plan")
      .def(py::init([](int layers, int microbatches, int devices, int first_backward_layer,
                       const std::vector<std::tuple<std::string, int, int, int, int, int, double>>& jobs) {
             Plan plan{layers, microbatches, devices, first_backward_layer, {}};
             for (const auto& [name, first, last, first_microbatch, last_microbatch, device, order] : jobs) {
               std::optional<Phase> phase;
               for (const Phase known : {Phase::kForward, Phase::kFused, Phase::kBackward}) {
                 if (name == phase_name(known)) phase = known;
               }
               if (!phase)
                 throw std::invalid_argument("[Plan] phase is '" + name + "', expected forward, fused or backward");
               plan.jobs.push_back({*phase, {first, last}, {first_microbatch, last_microbatch}, device, order});
             }
             validate(plan, mode_of(plan));
             return plan;
           }),
           py::arg("layers"), py::arg("microbatches"), py::arg("devices"), py::arg("first_backward_layer"),
           py::arg("jobs"))
      .def_readonly("first_backward_layer", &Plan::first_backward_layer)
      .def(py::self == py::self)
      .def_readonly("layers", &Plan::layers)
      .def_readonly("microbatches", &Plan::microbatches)
      .def_readonly("devices", &Plan::devices)
      .def_readonly("jobs", &Plan::jobs);
  py::class_<Stages>(module, "Stages")
      .def(py::init<>())
      .def_readwrite("forward", &Stages::forward)
      .def_readwrite("backward", &Stages::backward);
  py::class_<LayerCost>(module, "LayerCost")
      .def(py::init([](double forward_ms, double backward_ms, std::optional<double> recompute_ms,
                       std::int64_t weight_bytes, std::int64_t gradient_bytes, std::int64_t activation_bytes,
                       std::int64_t saved_bytes, bool trained, std::int64_t frozen_bytes) {
             LayerCost cost{forward_ms,       backward_ms, weight_bytes, gradient_bytes,
                            activation_bytes, saved_bytes, recompute_ms, trained};
             cost.frozen_bytes = frozen_bytes;
             return cost;
           }),
           py::kw_only(), py::arg("forward_ms"), py::arg("backward_ms"), py::arg("recompute_ms") = py::none(),
           py::arg("weight_bytes") = 0, py::arg("gradient_bytes") = 0, py::arg("activation_bytes") = 0,
           py::arg("saved_bytes") = 0, py::arg("trained") = true, py::arg("frozen_bytes") = 0)
      .def_readonly("forward_ms", &LayerCost::forward_ms)
      .def_readonly("backward_ms", &LayerCost::backward_ms)
      .def_readonly("recompute_ms", &LayerCost::recompute_ms)
      .def_readonly("weight_bytes", &LayerCost::weight_bytes)
      .def_readonly("gradient_bytes", &LayerCost::gradient_bytes)
      .def_readonly("activation_bytes", &LayerCost::activation_bytes)
      .def_readonly("saved_bytes", &LayerCost::saved_bytes)
      .def_readonly("trained", &LayerCost::trained)
      .def_property_readonly("updated_bytes", &LayerCost::updated_bytes);
  ValueClass<LayerWork>(module, "LayerWork")
      .attribute("product_operations", &LayerWork::product_operations)
      .attribute("attention_operations", &LayerWork::attention_operations)
      .attribute("element_bytes", &LayerWork::element_bytes)
      .attribute("products", &LayerWork::products)
      .attribute("attentions", &LayerWork::attentions)
      .attribute("element_kernels", &LayerWork::element_kernels)
      .def(py::init([](double product_operations, double attention_operations, double element_bytes, double products,
                       double attentions, double element_kernels) {
             return LayerWork{product_operations, attention_operations, element_bytes,
                              products,           attentions,           element_kernels};
           }),
           py::kw_only(), py::arg("product_operations") = 0.0, py::arg("attention_operations") = 0.0,
           py::arg("element_bytes") = 0.0, py::arg("products") = 0.0, py::arg("attentions") = 0.0,
           py::arg("element_kernels") = 0.0)
      .def("__add__",
           [](LayerWork work, const LayerWork& other) {
             work += other;
             return work;
           })
      .def("__sub__", [](LayerWork work, const LayerWork& other) {
        work -= other;
        return work;
      });
  ValueClass<Card>(module, "Card")
      .attribute("product_tflops", &Card::product_tflops)
      .attribute("attention_tflops", &Card::attention_tflops)
      .attribute("memory_gb_per_s", &Card::memory_gb_per_s)
      .attribute("launch_us", &Card::launch_us)
      .def(py::init([](double product_tflops, double attention_tflops, double memory_gb_per_s, double launch_us) {
             return Card{product_tflops, attention_tflops, memory_gb_per_s, launch_us};
           }),
           py::kw_only(), py::arg("product_tflops") = 0.0, py::arg("attention_tflops") = 0.0,
           py::arg("memory_gb_per_s") = 0.0, py::arg("launch_us") = 0.0);
  module.def("time_ms", &time_ms, py::arg("work"), py::arg("card"));
  module.def("gradient_sums", &gradient_sums, py::arg("gradient_bytes"));
  py::class_<Cluster>(module, "Cluster")
      .def(py::init([](const std::vector<std::pair<double, std::int64_t>>& devices, double link_up, double link_down,
                       double host, double hop_latency_ms, std::int64_t resident_bytes, bool on_host_cores) {
             Cluster cluster{{}, link_up, link_down, host, hop_latency_ms, on_host_cores};
             for (const auto& [speed, memory_bytes] : devices)
               cluster.devices.push_back({speed, memory_bytes, resident_bytes});
             return cluster;
           }),
           py::kw_only(), py::arg("devices"), py::arg("link_up_gb_per_s") = 0.0, py::arg("link_down_gb_per_s") = 0.0,
           py::arg("host_gb_per_s") = 0.0, py::arg("hop_latency_ms") = 0.0, py::arg("resident_bytes") = 0,
           py::arg("on_host_cores") = false)
      .def("__len__", [](const Cluster& cluster) { return cluster.devices.size(); });
  py::class_<TimingRules>(module, "TimingRules")
      .def(py::init([](bool asynchronous, bool hop_on_same_device, bool late_recompute) {
             return TimingRules{asynchronous, hop_on_same_device, late_recompute};
           }),
           py::kw_only(), py::arg("asynchronous") = true, py::arg("hop_on_same_device") = false,
           py::arg("late_recompute") = false);
  ValueClass<CutStage>(module, "CutStage")
      .attribute("layers", &CutStage::layers)
      .attribute("replicas", &CutStage::replicas);
  py::class_<PlanChoice>(module, "PlanChoice")
      .def_property_readonly("cut", [](const PlanChoice& choice) { return to_string(choice.cut); })
      .def_property_readonly("stages", [](const PlanChoice& choice) { return to_stages(choice.cut); })
      .def_property_readonly("forward", [](const PlanChoice& choice) { return choice.cut.forward; })
      .def_property_readonly("backward", [](const PlanChoice& choice) { return choice.cut.backward; })
      .def_property_readonly("interleave", [](const PlanChoice& choice) { return choice.cut.interleave; })
      .def_readonly("recipe", &PlanChoice::recipe)
      .def_property_readonly("step_ms", [](const PlanChoice& choice) { return choice.rating.step_ms; })
      .def_property_readonly("work_ms", [](const PlanChoice& choice) { return choice.rating.work_ms; })
      .def_property_readonly("bubble", [](const PlanChoice& choice) { return choice.rating.bubble; })
      .def_readonly("traffic", &PlanChoice::traffic)
      .def_readonly("limit", &PlanChoice::limit);
  module.attr("SEARCH_EFFORT") = SearchOptions{}.effort;
  module.def("may_keep_layers", &schedule::may_keep_layers, py::arg("devices"), py::arg("gradient_groups"));
  module.def(
      "search",
      [](const LayerCosts& costs, const Cluster& cluster, int microbatches, PlanMode mode, TimingRules rules,
         int first_backward_layer, double max_traffic, bool replicas, int gradient_groups, bool interleave,
         int max_fused_layers, bool single_backward_layers, std::int64_t max_waiting_bytes, std::int64_t effort,
         unsigned seed, bool over_links, std::int64_t chunk_bytes, bool priorities, double update_gb_per_s,
         double update_traffic) {
        SearchOptions options;
        options.plan.mode = mode;
        options.plan.microbatches = microbatches;
        options.plan.first_backward_layer = first_backward_layer;
        options.plan.gradient_groups = gradient_groups;
        options.plan.single_backward_layers = single_backward_layers;
        options.rules = rules;
        options.update = {update_gb_per_s, update_traffic};
        options.max_traffic = max_traffic;
        options.replicas = replicas;
        options.interleave = interleave;
        options.max_fused_layers = max_fused_layers;
        options.max_waiting_bytes = max_waiting_bytes;
        options.effort = effort;
        options.seed = seed;
        // What a plan promises over links is what the simulator of links gets.
        if (!over_links && !has_rates(cluster)) return search(costs, cluster, options);
        simulate::LinkRules links;
        links.timing = rules;
        links.chunk_bytes = chunk_bytes;
        links.priorities = priorities;
        links.update = options.update;
        return simulate::search_links(costs, cluster, options, links);
      },
      py::arg("costs"), py::arg("cluster"), py::kw_only(), py::arg("microbatches"), py::arg("mode") = PlanMode::kFused,
      py::arg("rules") = TimingRules{}, py::arg("first_backward_layer") = 0, py::arg("max_traffic") = 0.0,
      py::arg("replicas") = true, py::arg("gradient_groups") = PlannerOptions{}.gradient_groups,
      py::arg("interleave") = true, py::arg("max_fused_layers") = 1, py::arg("single_backward_layers") = false,
      py::arg("max_waiting_bytes") = 0, py::arg("effort") = SearchOptions{}.effort,
      py::arg("seed") = SearchOptions{}.seed, py::arg("over_links") = false,
      py::arg("chunk_bytes") = simulate::LinkRules{}.chunk_bytes, py::arg("priorities") = true,
      py::arg("update_gb_per_s") = 0.0, py::arg("update_traffic") = 0.0, py::call_guard<py::gil_scoped_release>(),
      "The best plans found, best first; over_links: rated by simulate_links.");
  module.def(
      "place_over_links",
      [](const Plan& recipe, const LayerCosts& costs, const Cluster& cluster, TimingRules rules, int steps) {
        simulate::LinkRules links;
        links.timing = rules;
        return simulate::place_over_links(recipe, costs, cluster, links, steps);
      },
      py::arg("recipe"), py::arg("costs"), py::arg("cluster"), py::kw_only(), py::arg("rules") = TimingRules{},
      py::arg("steps") = 1, py::call_guard<py::gil_scoped_release>(), "A recipe with devices, one plan a step.");
  py::class_<Placer>(module, "Placer")
      .def(py::init<Plan, const LayerCosts&, const Cluster&, TimingRules>(), py::arg("recipe"), py::arg("costs"),
           py::arg("cluster"), py::arg("rules"))
      .def("next", &Placer::next);
  module.def(
      "traffic_ratio", [](const Plan& plan, const LayerCosts& costs) { return traffic_ratio(plan, CostSums(costs)); },
      py::arg("plan"), py::arg("costs"));

  py::enum_<Baseline>(module, "Baseline")
      .value("GPIPE", Baseline::kGPipe)
      .value("ONE_FORWARD_ONE_BACK", Baseline::kOneForwardOneBack)
      .value("INTERLEAVED", Baseline::kInterleaved)
      .value("LOOPED_BFS", Baseline::kLoopedBfs)
      .value("PUBLISHED", Baseline::kPublished);
  py::class_<BaselineSizes>(module, "BaselineSizes")
      .def(py::init<>())
      .def_readwrite("pipeline", &BaselineSizes::pipeline)
      .def_readwrite("chunks", &BaselineSizes::chunks)
      .def_readwrite("forward", &BaselineSizes::forward)
      .def_readwrite("backward", &BaselineSizes::backward);
  module.def("default_sizes", &default_sizes, py::arg("costs"), py::arg("devices"));
  module.def("baseline_plan", &baseline_plan, py::arg("baseline"), py::arg("sizes"), py::arg("layers"),
             py::arg("devices"), py::arg("microbatches"), py::arg("first_device") = 0);

  ValueClass<TimelineEvent>(module, "TimelineEvent")
      .attribute("step", &TimelineEvent::step)
      .attribute("job", &TimelineEvent::job)
      .attribute("microbatch", &TimelineEvent::microbatch)
      .attribute("device", &TimelineEvent::device)
      .attribute("phase", [](const TimelineEvent& event) { return phase_name(event.phase); })
      .attribute("start_ms", &TimelineEvent::start_ms)
      .attribute("end_ms", &TimelineEvent::end_ms)
      .attribute("recompute_ms", &TimelineEvent::recompute_ms);
  py::class_<simulate::Timeline>(module, "Timeline")
      .def_readonly("makespan_ms", &simulate::Timeline::makespan_ms)
      .def_readonly("steady_step_ms", &simulate::Timeline::steady_step_ms)
      .def_readonly("bubble", &simulate::Timeline::bubble)
      .def_readonly("steady_bubble", &simulate::Timeline::steady_bubble)
      .def_readonly("events", &simulate::Timeline::events);
  module.def(
      "simulate",
      [](const std::vector<Plan>& plans, const LayerCosts& costs, const Cluster& cluster, TimingRules rules) {
        simulate::Timeline timeline = simulate::simulate(plans, costs, cluster, rules);
        simulate::check(timeline, plans, rules);
        return timeline;
      },
      py::arg("plans"), py::arg("costs"), py::arg("cluster"), py::arg("rules") = TimingRules{},
      py::call_guard<py::gil_scoped_release>(), "Runs one plan a step, and checks the result against the rules.");
  ValueClass<TransferEvent>(module, "TransferEvent")
      .attribute("step", &TransferEvent::step)
      .attribute("job", &TransferEvent::job)
      .attribute("device", &TransferEvent::device)
      .attribute("up", &TransferEvent::up)
      .attribute("kind", [](const TransferEvent& event) { return name_of(event.kind); })
      .attribute("start_ms", &TransferEvent::start_ms)
      .attribute("end_ms", &TransferEvent::end_ms);
  py::class_<simulate::LinkTimeline>(module, "LinkTimeline")
      .def_readonly("timeline", &simulate::LinkTimeline::timeline)
      .def_readonly("transfers", &simulate::LinkTimeline::transfers)
      .def_readonly("network_busy_ms", &simulate::LinkTimeline::network_busy_ms);
  module.def(
      "simulate_links",
      [](const std::vector<Plan>& plans, const LayerCosts& costs, const Cluster& cluster, TimingRules rules,
         std::int64_t chunk_bytes, bool priorities, double update_gb_per_s, double update_traffic, int nodes,
         double network_gb_per_s, double network_latency_ms, bool clipped, bool at_once) {
        simulate::LinkRules links;
        links.timing = rules;
        links.chunk_bytes = chunk_bytes;
        links.priorities = priorities;
        links.update = {update_gb_per_s, update_traffic};
        links.nodes = {nodes, network_gb_per_s, network_latency_ms, clipped, at_once};
        simulate::LinkTimeline timeline = simulate::simulate_links(plans, costs, cluster, links);
        simulate::check(timeline.timeline, plans, rules);
        return timeline;
      },
      py::arg("plans"), py::arg("costs"), py::arg("cluster"), py::kw_only(), py::arg("rules") = TimingRules{},
      py::arg("chunk_bytes") = simulate::LinkRules{}.chunk_bytes, py::arg("priorities") = true,
      py::arg("update_gb_per_s") = 0.0, py::arg("update_traffic") = 0.0, py::arg("nodes") = simulate::NodeRules{}.nodes,
      py::arg("network_gb_per_s") = simulate::NodeRules{}.network_gb_per_s,
      py::arg("network_latency_ms") = simulate::NodeRules{}.latency_ms,
      py::arg("clipped") = simulate::NodeRules{}.clipped, py::arg("at_once") = simulate::NodeRules{}.at_once,
      py::call_guard<py::gil_scoped_release>(),
      "Runs one plan a step with every byte on the links, on every one of the nodes, and checks the result against the "
      "rules.");
}

}  // namespace roundpipe::python
