// Which page is shown, and what changes while it is.
import { bdi, el } from "./dom.js";
import { ledger } from "./ledger.js";
import { follow } from "./net.js";
import { more, node, nodes, numbers, overview, policies, recipe, tasks } from "./pages.js";
import { rollout, rollouts } from "./rollouts.js";

const pages = { "": overview, nodes, node, rollouts, rollout, tasks, policies, ledger, recipe };
const main = document.getElementById("main"), live = document.getElementById("live");
let shownNow = 0, step = null;

async function show(moved) {
  const mine = ++shownNow, address = location.hash.startsWith("#/") ? location.hash.slice(2) : "";
  const [path, query] = address.split("?"), [name, ...rest] = path.split("/").map(decodeURIComponent);
  const page = Object.hasOwn(pages, name) ? pages[name] : overview;
  for (const each of document.querySelectorAll("nav a")) {
    if (each.getAttribute("href") === `#/${name}`) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  let content;
  try {
    content = await page(rest.map(encodeURIComponent).join("/"), new URLSearchParams(query ?? ""));
  } catch (error) {
    content = [el("h1", {}, "Not shown"), el("p", {}, bdi(error.message))];
  }
  if (mine !== shownNow) return;
  main.replaceChildren(...content.flat(Infinity).filter(Boolean));
  if (moved) main.focus({ preventScroll: false });
}

follow((now) => {
  document.getElementById("name").replaceChildren(bdi(now.name));
  document.title = `${now.name}: step ${now.step} of ${now.steps}`;
  for (const [id, made] of [["now", numbers], ["more", more]]) {
    document.getElementById(id)?.replaceChildren(...made(now).flat(Infinity).filter(Boolean));
  }
  if (step !== null && now.step !== step && document.getElementById("now")) show(false);
  step = now.step;
}, (state) => { if (live.textContent !== state) live.textContent = state; });
addEventListener("hashchange", () => show(true));
show(false);
