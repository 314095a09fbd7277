// The admin API, with the token that the person typed. It is kept in this tab's session storage and nowhere else.

const KEPT = "widebeam.token";
const BASE = new URL("../admin/v1/", location.href);
const LONGEST_MS = 8000;

/** What the server said where it did not do what was asked. status 0: it did not answer. */
export class Refusal extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEPT) ?? "",
  set: (text) => sessionStorage.setItem(KEPT, text),
  forget: () => sessionStorage.removeItem(KEPT),
};

/** One call. path: below /admin/v1. Throws Refusal. */
async function call(method, path, { body, epoch, waitMs = 0 } = {}) {
  const headers = { accept: "application/json" };
  if (token.get()) headers.authorization = `Bearer ${token.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  if (epoch) headers["if-match"] = `"${epoch}"`;
  let reply;
  try {
    reply = await fetch(new URL(`./${path}`, BASE), { // ./: "snapshots:unpin" alone would be a scheme
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      signal: AbortSignal.timeout(LONGEST_MS + waitMs),
    });
  } catch {
    throw new Refusal(0, "unreachable", "The server does not answer.");
  }
  const document = await reply.json().catch(() => ({}));
  if (!reply.ok) {
    const error = document.error ?? {};
    throw new Refusal(reply.status, error.code ?? "", error.message ?? `The server answered ${reply.status}.`);
  }
  return { status: reply.status, document };
}

export const read = async (path) => (await call("GET", path)).document;

/** Decide, provided that nothing has changed since the document with this epoch. */
export const decide = (path, epoch, body, waitS = 0) =>
  call("POST", waitS ? `${path}?wait=${waitS}` : path, { epoch, body, waitMs: 1000 * waitS });
