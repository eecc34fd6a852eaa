// SHA-256 of a text, for pages that come over plain HTTP, where the browser has no crypto.subtle.
const primes = []; for (let n = 2; primes.length < 64; n++) if (primes.every((p) => n % p)) primes.push(n);
const fraction = (value) => Math.floor((value - Math.floor(value)) * 2 ** 32) >>> 0;
const K = primes.map((p) => fraction(Math.cbrt(p))), H0 = primes.slice(0, 8).map((p) => fraction(Math.sqrt(p)));
const turn = (value, by) => (value >>> by) | (value << (32 - by));

export function sha256(text) {
  const bytes = new TextEncoder().encode(text), size = Math.ceil((bytes.length + 9) / 64) * 64;
  const view = new DataView(new ArrayBuffer(size));
  bytes.forEach((byte, at) => view.setUint8(at, byte));
  view.setUint8(bytes.length, 128);
  view.setUint32(size - 8, Math.floor(bytes.length / 2 ** 29));
  view.setUint32(size - 4, bytes.length * 8);
  const hash = [...H0], w = new Uint32Array(64);
  for (let start = 0; start < size; start += 64) {
    for (let i = 0; i < 16; i++) w[i] = view.getUint32(start + 4 * i);
    for (let i = 16; i < 64; i++) {
      const a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (turn(a, 7) ^ turn(a, 18) ^ (a >>> 3)) + w[i - 7] + (turn(b, 17) ^ turn(b, 19) ^ (b >>> 10));
    }
    let [a, b, c, d, e, f, g, h] = hash;
    for (let i = 0; i < 64; i++) {
      const one = (h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + K[i] + w[i]) | 0;
      const two = ((turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      [h, g, f, e, d, c, b, a] = [g, f, e, (d + one) | 0, c, b, a, (one + two) | 0];
    }
    [a, b, c, d, e, f, g, h].forEach((value, i) => { hash[i] = (hash[i] + value) >>> 0; });
  }
  return hash.map((value) => value.toString(16).padStart(8, "0")).join("");
}
