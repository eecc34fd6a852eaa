// The ledger, whose chain of hashes this browser checks itself. Signatures of its head it does not check.
import { bdi, el, format, table, when } from "./dom.js";
import { view } from "./net.js";
import { sha256 } from "./sha256.js";

export async function ledger(_rest, asked) {
  const after = Number(asked.get("after") ?? -1), page = await view("ledger", { after });
  const rows = page.rows.map((row) => ({ ...JSON.parse(row.text), hash: row.hash }));
  const result = el("p", { id: "verified", role: "status" });
  const button = el("button", { onclick: () => verify(result).catch((error) => { result.textContent = error.message; }) },
    "Check the whole chain in this browser");
  const last = rows.at(-1)?.index;
  return [el("h1", {}, "Ledger"), el("p", {}, button, ` ${format(page.head.index + 1)} rows, head `, el("code", {}, page.head.hash.slice(0, 16))), result,
    table(["row", "time", "kind", "what", "hash"], rows.map((row) =>
      [row.index, when(row.at_ms), row.kind, bdi(JSON.stringify(row.body).slice(0, 300)), row.hash.slice(0, 12)]), "Rows"),
    last < page.head.index ? el("p", {}, el("a", { href: `#/ledger?after=${last}` }, "more")) : null];
}

async function verify(result) {
  let after = -1, previous = "0".repeat(64), head = null;
  do {
    const page = await view("ledger", { after, limit: 1000 });
    head ??= page.head;
    for (const { text, hash } of page.rows) {
      const row = JSON.parse(text);
      if (row.index !== after + 1 || row.previous !== previous) throw new Error(`Row ${after + 1} does not follow the one before.`);
      if (sha256(`shoal/ledger/v1\n${text}`) !== hash) throw new Error(`Row ${row.index} was changed: its hash does not match.`);
      [after, previous] = [row.index, hash];
      if (after === head.index && hash !== head.hash) throw new Error("The head is of another ledger.");
    }
    result.textContent = `${format(after + 1)} rows are in order …`;
    if (!page.rows.length) break;
  } while (after < head.index);
  if (after < head.index) throw new Error("The ledger is shorter than its head.");
  result.textContent = `All ${format(after + 1)} rows are in order, up to the head. (Signatures: shoal ledger verify RUN.)`;
}
