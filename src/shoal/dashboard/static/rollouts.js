// What the model wrote: a list with filters, and one rollout with a heat map of its tokens.
import { bdi, el, format, link, table, when } from "./dom.js";
import { csv, view } from "./net.js";

const orders = ["newest", "oldest", "worst", "best", "longest", "random", "changed"];
const outcomes = ["", "accepted", "dropped", "rejected", "unsure", "pulled"];
const fields = ["task", "node", "reason", "text", "unit", "step", "version"];

export async function rollouts(_rest, asked) {
  const wanted = Object.fromEntries([...asked].filter(([name]) => [...fields, "order", "outcome", "after"].includes(name)));
  const choice = (name, values) => el("label", {}, name, el("select", { name },
    values.map((value) => el("option", { value, selected: (wanted[name] ?? values[0]) === value }, value || "any"))));
  const form = el("form", { onsubmit: (event) => { event.preventDefault();
    const chosen = [...new FormData(event.target)].filter(([, value]) => value !== "");
    location.hash = `#/rollouts?${new URLSearchParams(chosen)}`; } },
  choice("order", orders), choice("outcome", outcomes),
  fields.map((name) => el("label", {}, name, el("input", { name, value: wanted[name] ?? "", size: 10 }))), el("button", {}, "Show"));
  const found = await view("rollouts", { limit: 100, ...wanted });
  const rows = found.map((each) => [link(`rollout/${each.group}/${each.sample}`, `${each.unit}.${each.sample}`), bdi(each.task),
    el("span", { class: each.outcome }, each.outcome), each.reward === null ? "unscored" : each.reward, each.tokens, each.step,
    each.version, link(`node/${each.node}`, each.node.slice(0, 8)), bdi(each.reason), when(each.decided_at_ms)]);
  const after = Number(wanted.after ?? 0) + 100;
  return [el("h1", {}, "Rollouts"), form,
    table(["unit.sample", "task", "outcome", "reward", "tokens", "step", "version", "node", "reason", "judged"], rows, "Rollouts"),
    found.length === 100 ? el("p", {}, el("a", { href: `#/rollouts?${new URLSearchParams({ ...wanted, after })}` }, "more")) : null,
    el("p", {}, el("a", { href: csv("rollouts", wanted), download: "" }, "as CSV"))];
}

export async function rollout(rest) {
  const it = await view(`rollout/${rest}`);
  const parts = Object.entries(it.parts).map(([name, value]) => `${name} ${format(value)}`).join(", ");
  return [el("h1", {}, `Unit ${it.unit}, sample ${it.sample}: `, el("span", { class: it.outcome }, it.outcome)),
    el("p", {}, "Reward ", el("b", {}, it.reward === null ? "unscored" : format(it.reward)), parts ? [" (", bdi(parts), ")"] : null,
      `; ${format(it.tokens)} tokens, ended by `, bdi(it.finish), `; step ${it.step}, version ${it.incarnation}.${it.version}; node `,
      link(`node/${it.node}`, it.node.slice(0, 12)), "; task ", bdi(it.task)),
    it.reason ? el("p", { class: "rejected" }, bdi(`${it.reason}: ${it.message}`)) : null,
    it.kept ? [el("h2", {}, "Prompt"), el("div", { class: "text" }, bdi(it.prompt)), el("h2", {}, "Completion"), tokens(it)]
      : el("p", {}, "Its texts were left out: the records reached hub.records_gb."),
    it.checks.length ? [el("h2", {}, "Checks"), table(["check", "passed", "numbers", "message"], it.checks.map((each) =>
      [bdi(each.check), each.passed ? "yes" : "no", bdi(Object.entries(each.evidence ?? {}).map(([name, value]) =>
        `${name} ${typeof value === "number" ? format(value) : value}`).join(", ")), bdi(each.message ?? "")]), "Checks of the group")] : null];
}

function tokens(it) {
  const heat = (at) => { const gap = Math.abs(it.gaps[at] ?? 0), outside = (it.margins[at] ?? 0) < 0;
    return outside || gap > 0.1 ? "heat3" : gap > 0.01 ? "heat2" : gap > 0.001 ? "heat1" : ""; };
  const title = (at) => [`token ${it.token_ids[at]}`, it.logprobs[at] === undefined ? "" : `log-probability ${format(it.logprobs[at])}`,
    it.gaps[at] == null ? "" : `differs by ${format(it.gaps[at])}`, it.margins[at] == null ? "" : `margin ${format(it.margins[at])}`]
    .filter(Boolean).join(", ");
  const spans = (it.pieces ?? []).map((piece, at) => el("span", { class: `token ${heat(at)}`, title: title(at) }, piece));
  const note = it.gaps.length ? "Coloured: tokens whose log-probability the validator computes otherwise (over 0.001, 0.01, 0.1), or outside their interval."
    : "Numbers of single tokens are for the run's owner.";
  return [el("div", { class: "text", dir: "auto" }, spans.length ? spans : bdi(it.completion)), el("p", { class: "soft" }, note)];
}
