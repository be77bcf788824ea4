// Describes a picture with fetch: node caption.mjs picture.jpg [question]
import { readFile } from "node:fs/promises";

const url = process.env.BEHOLDER_URL ?? "http://127.0.0.1:8000";
const key = process.env.BEHOLDER_KEY;

/** The JSON of every server-sent event. Throws when the stream fails or is cut. */
async function* events(response) {
  let rest = "";
  for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
    const blocks = (rest + text).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (block === "data: [DONE]") return;
      if (!block.startsWith("data: ")) continue; // a ": ping" comment
      const event = JSON.parse(block.slice("data: ".length));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
  throw new Error("the stream was cut before its end");
}

const [file, prompt] = process.argv.slice(2);
if (!file) {
  console.error("usage: node caption.mjs picture.jpg [question]");
  process.exit(2);
}
const picture = await readFile(file);
const response = await fetch(`${url}/v1/captions`, {
  method: "POST",
  headers: { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) },
  body: JSON.stringify({ image: picture.toString("base64"), stream: true, prompt }),
});
if (!response.ok) {
  console.error((await response.json()).error.message);
  process.exit(1);
}
for await (const event of events(response)) {
  if (event.object === "caption.chunk") process.stdout.write(event.text);
}
process.stdout.write("\n");
