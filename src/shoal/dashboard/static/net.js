// Reading what the hub shows. Answers are JSON; a refusal is an Error with the hub's own sentence.
export async function view(path, asked = {}) {
  const query = new URLSearchParams(Object.entries(asked).filter(([, value]) => value !== "" && value !== undefined));
  const answer = await fetch(`/view/${path}${query.size ? `?${query}` : ""}`, { credentials: "omit" });
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.message ?? `HTTP ${answer.status}`);
  return value;
}

export const csv = (path, asked = {}) => `/view/${path}?${new URLSearchParams({ ...asked, format: "csv" })}`;

// Server-sent events: the overview, each time that it has changed. The browser asks again by itself.
export function follow(changed, stateChanged) {
  const source = new EventSource("/view/events");
  let lost = 0;
  const alive = () => { clearTimeout(lost); lost = 0; stateChanged("live"); };
  source.onopen = alive;
  source.onerror = () => { lost ||= setTimeout(() => stateChanged("no connection to the hub"), 8000); };
  source.onmessage = (event) => { alive(); changed(JSON.parse(event.data)); };
}
