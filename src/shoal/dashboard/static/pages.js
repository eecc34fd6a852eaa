// Every page but those with texts: a function of what is in the address to the elements of the page.
import { chart } from "./charts.js";
import { bdi, el, format, link, table, when } from "./dom.js";
import { csv, view } from "./net.js";

const figures = [
  ["Reward", ["sampled_reward", "reward_mean"]], ["Held-out score", ["held_out"]], ["Tokens of a completion", ["completion_tokens"]],
  ["Entropy", ["entropy"]], ["Staleness", ["staleness_mean", "staleness_max"]], ["Trained tokens/s", ["tokens_per_s"]],
  ["Share of the time idle", ["idle_fraction"]], ["Gradient norm", ["grad_norm"]], ["Dropped groups", ["dropped_groups"]],
];

export async function overview() {
  const [now, columns] = await Promise.all([view("overview"), view("series")]);
  const parts = Object.keys(columns).filter((name) => name.startsWith("part_"));
  const drawn = [figures[0], ["Parts of the reward", parts], ...figures.slice(1)].map(([title, names]) => chart(title, columns, names));
  return [el("h1", {}, bdi(now.name)), el("div", { id: "now" }, numbers(now)),
    el("h2", {}, "Steps"), drawn.some(Boolean) ? el("div", { class: "charts" }, drawn) : el("p", {}, "No step has been trained yet."),
    el("div", { id: "more" }, more(now)),
    el("p", {}, el("a", { href: csv("series", { points: 1000000 }), download: "" }, "all metrics as CSV"))];
}

export function numbers(now) {
  const card = (label, value) => el("div", { class: "card" }, el("span", {}, label), el("b", {}, value));
  const states = Object.entries(now.submissions).filter(([, count]) => count);
  const told = [...now.standstill, ...now.alarms];
  return [told.map((text) => el("div", { class: "alarm", role: "alert" }, bdi(text))),
    el("div", { class: "cards" }, card("Step", `${format(now.step)} of ${format(now.steps)}`),
      card("State", now.finished ? "finished" : now.conduct), states.map(([name, count]) => card(name, format(count))),
      card("Credit", format(now.credit)), card("Ledger rows", format(now.ledger_rows)), card("Unscored", format(now.unscored)))];
}

export function more(now) {
  const refused = Object.entries(now.refused).sort((a, b) => b[1] - a[1]);
  const nodes = Object.entries(now.node_counts).filter(([, count]) => count);
  return [el("h2", {}, "Who is here"), table(["role and state", "nodes"], nodes, "Nodes by role and state"),
    refused.length ? [el("h2", {}, "Not accepted"), table(["outcome: reason", "groups"], refused, "Groups by reason")] : null,
    now.waits.length ? [el("h2", {}, "Who waits for what"),
      table(["who", "for what", "since"], now.waits.map((each) => [each.who, each.what, when(each.since_ms)]), "Waits")] : null];
}

export async function nodes(_rest, asked) {
  const found = await view("nodes", { after: asked.get("after") ?? "" });
  const rows = found.map((node) => [link(`node/${node.node}`, node.name || node.node.slice(0, 12)), node.role,
    el("span", { class: node.state }, node.state), node.liveness, node.accepted, node.rejected, node.unsure, node.credit, bdi(node.doing)]);
  const last = found.at(-1)?.node;
  return [el("h1", {}, "Nodes"), table(["node", "role", "state", "liveness", "accepted", "rejected", "unsure", "credit", "doing"], rows, "Nodes"),
    found.length >= 200 ? el("p", {}, el("a", { href: `#/nodes?after=${last}` }, "more")) : null,
    el("p", {}, el("a", { href: csv("nodes"), download: "" }, "as CSV"))];
}

export async function node(id) {
  const story = await view(`node/${encodeURIComponent(id)}`), it = story.node;
  const card = (label, value) => el("div", { class: "card" }, el("span", {}, label), el("b", {}, format(value)));
  const group = (each) => [link(`rollouts?unit=${each.unit}`, String(each.unit)), el("span", { class: each.state }, each.state),
    when(each.decided_at_ms), each.generated_tokens, each.credit, bdi(each.reason), bdi(each.message || each.rule)];
  const heads = ["unit", "state", "decided", "tokens", "credit", "reason", "what was said"];
  return [el("h1", {}, bdi(it.name || it.node)), el("p", {}, bdi(story.sentence)), el("p", { class: "soft" }, it.node),
    el("div", { class: "cards" }, card("Credit", it.credit), card("Pending", it.pending), card("Accepted", it.accepted),
      card("Rejected", it.rejected), card("Unsure", it.unsure), card("Full audits passed", story.passed)),
    el("h2", {}, "Tokens accepted by hour"),
    table(["hour", "tokens"], story.hours.slice(-48).reverse().map((each) => [when(each.hour_ms), each.tokens]), "Tokens by hour"),
    story.same_kind_tokens_per_hour === null ? null
      : el("p", {}, `Others of the same kind: ${format(story.same_kind_tokens_per_hour)} tokens an hour (median).`),
    el("h2", {}, "Not accepted, and why"), table(heads, story.refused.map(group), "Refused work"),
    el("h2", {}, "Recent work"), table(heads, story.recent.map(group), "Recent work")];
}

export async function tasks() {
  const found = await view("tasks");
  const rows = found.map((each) => [link(`rollouts?task=${encodeURIComponent(each.task)}`, each.task), each.rollouts,
    each.rewards[0], each.rewards.at(-1), each.versions.map((version, at) => `${version}: ${format(each.rewards[at])}`).join("  ")]);
  return [el("h1", {}, "Tasks"), table(["task", "rollouts", "first reward", "last reward", "mean reward by version"], rows, "Tasks asked most")];
}

export async function policies() {
  const rows = (await view("policies")).map((each) => [`${each.incarnation}.${each.version}`, when(each.announced_at_ms),
    each.held_out, each.groups, each.digest.slice(0, 16)]);
  return [el("h1", {}, "Policies"), table(["version", "announced", "held-out score", "groups judged", "digest"], rows, "Versions, newest first")];
}

export async function recipe() {
  return [el("h1", {}, "Recipe"), el("pre", { tabindex: 0 }, (await view("recipe")).text)];
}
