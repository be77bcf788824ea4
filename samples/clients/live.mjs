// Captions of a live camera over WebSocket, in a page or in Node 20 and later. One file, no build.
//
//   page:  <video id="camera" autoplay muted playsinline></video> <p id="caption"></p>
//          <script type="module">
//            import { live, camera } from "./live.mjs";
//            const caption = document.getElementById("caption");
//            live({ url: location.origin, source: await camera(document.getElementById("camera")),
//                   onText: (text) => { caption.textContent = text; } });
//          </script>
//   Node:  node --experimental-websocket live.mjs picture.jpg another.jpg …

const MAX_BUFFERED = 256 * 1024; // an old frame in the network's queue is worse than none
const GONE = [4404, 4408, 4410]; // too late to resume, nothing sent for long, as old as sessions may be

/**
 * Starts a session and keeps it through lost connections.
 * @param url      of the server, such as http://127.0.0.1:8000
 * @param source   async iterable of Blobs or bytes: JPEG or PNG pictures
 * @param session  settings, see docs/protocol.md
 * @param onText   called with the caption so far
 * @param onEvent  called with every event
 * @param ticket   async function that gives a fresh ticket, for servers that want a key
 * @returns        a promise that ends with the source; it fails with the source, when the server refuses the session, and
 *                 when there is no server at first
 */
export function live({ url, source, session = {}, onText = () => {}, onEvent = () => {}, ticket }) {
  const state = { id: null, token: null, seq: 0, socket: null, open: null, failure: null };
  const [begun, done, over] = [false, false, false]; // there was a session; the source has ended; all has
  Object.assign(state, { begun, done, over });
  const say = (event) => state.socket.send(JSON.stringify(event));
  let caption = "";
  let open = null; // resolves `state.open`, on which waits who has something to send and no session to send it to
  const close = () => {
    if (!open) state.open = new Promise((resolve) => (open = resolve));
  };
  const opens = () => (open = open?.());
  close();

  const hear = (event) => {
    if (event.seq) state.seq = event.seq;
    onEvent(event);
    if (event.type === "response.created") caption = "";
    if (event.type === "response.output_text.delta") onText((caption += event.delta));
    if (event.type === "error" && event.error.fatal) state.failure = event.error;
  };

  // One connection, from its opening to its close.
  const connection = async () => {
    const protocols = ["vlm.stream.v1"];
    try {
      if (ticket) protocols.push(`vlm.ticket.${await ticket()}`);
    } catch (error) {
      if (!state.begun) throw error;
      return { code: 1006, reason: "" }; // nobody there to give one: try again later
    }
    const socket = new WebSocket(`${url.replace(/^http/, "ws")}/v1/stream`, protocols);
    let opened = false;
    return new Promise((resolve) => {
      socket.onopen = () => {
        state.socket = socket;
        if (state.id) {
          say({ type: "session.resume", session_id: state.id, resume_token: state.token, last_seq: state.seq });
        }
      };
      socket.onmessage = ({ data }) => {
        const event = JSON.parse(data);
        const wasOpened = opened;
        if (event.type === "session.created" && !state.id) {
          [state.id, state.token, opened] = [event.session_id, event.resume_token, true];
          state.begun = true;
          say({ type: "session.update", session: { trigger: { mode: "continuous" }, max_tokens: 64, ...session } });
        }
        if (event.type === "session.resumed" || event.type === "session.resync_required") opened = true;
        if (opened && !wasOpened) {
          opens();
          if (state.done) say({ type: "session.close" }); // the last one was lost with its connection
        }
        if (opened || event.type === "error") hear(event); // before that: a session that we do not want
      };
      socket.onerror = () => opened || socket.onclose({ code: 1006, reason: "" }); // Node 20 does not say that it closed
      socket.onclose = ({ code, reason }) => {
        state.socket = socket.onclose = socket.onerror = null;
        close();
        if (GONE.includes(code)) [state.id, state.failure] = [null, null]; // begin another session
        resolve({ code, reason });
      };
    });
  };

  // Until something can be sent. A socket that is closing would take it, and lose it.
  const ready = async () => {
    for (;;) {
      await state.open;
      if (state.over || state.socket?.readyState === WebSocket.OPEN) return;
      close();
    }
  };

  const send = async () => {
    await ready();
    for await (const picture of source) {
      await ready(); // while the connection is lost no frame is taken
      if (state.over) return;
      if (state.socket.bufferedAmount < MAX_BUFFERED) state.socket.send(picture);
    }
    await ready();
    say({ type: "session.close" });
    state.done = true;
  };

  const run = async () => {
    const sending = send();
    sending.catch(() => {
      state.over = true;
      state.socket?.close(1000);
    });
    for (let wait = 250; ; wait = Math.min(wait * 2, 8000)) {
      const began = Date.now();
      const { code, reason } = await connection();
      if (code === 1000 || state.over) return sending;
      if (code === 1006 && !state.begun) throw new Error(`no answer from ${url}`);
      if (code === 4401 || code === 4409 || state.failure) {
        state.over = true;
        throw new Error(`${code} ${state.failure?.message ?? reason}`);
      }
      if (Date.now() - began > 10_000) wait = 250;
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  };
  return run();
}

/** Frames of the camera, shown in a <video> element, as JPEG blobs. */
export async function camera(video, { fps = 5, width = 640 } = {}) {
  video.srcObject = await navigator.mediaDevices.getUserMedia({ video: { width: { ideal: width } } });
  await video.play();
  const canvas = document.createElement("canvas");
  return (async function* () {
    for (;;) {
      const next = new Promise((resolve) => setTimeout(resolve, 1000 / fps));
      await new Promise((resolve) => video.requestVideoFrameCallback?.(resolve) ?? resolve());
      canvas.width = Math.min(width, video.videoWidth);
      canvas.height = Math.round((canvas.width * video.videoHeight) / video.videoWidth);
      canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
      yield await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.7));
      await next;
    }
  })();
}

/** Node: the pictures that the command line names, one after another's caption. */
async function main(files) {
  const { readFile } = await import("node:fs/promises");
  const url = process.env.BEHOLDER_URL ?? "http://127.0.0.1:8000";
  const key = process.env.BEHOLDER_KEY;
  let captioned = () => {};
  const source = (async function* () {
    for (const file of files) {
      const done = new Promise((resolve) => (captioned = resolve));
      yield await readFile(file);
      await done;
    }
  })();
  const onEvent = (event) => {
    if (event.type === "response.output_text.delta") process.stdout.write(event.delta);
    if (event.type === "error") {
      console.error(event.error.message);
      captioned(); // it was no picture: on with the next one
    }
    if (event.type === "response.done") {
      if (event.error) console.error(event.error.message);
      console.log(`   [${event.status}]`);
      captioned();
    }
  };
  const headers = { authorization: `Bearer ${key}` };
  const ticket = async () => {
    const response = await fetch(`${url}/v1/stream/tickets`, { method: "POST", headers });
    if (!response.ok) throw new Error((await response.json()).error.message);
    return (await response.json()).ticket;
  };
  await live({ url, source, onEvent, ticket: key && ticket });
}

if (typeof process !== "undefined" && process.argv[1]?.endsWith("live.mjs")) {
  main(process.argv.slice(2)).catch((error) => {
    console.error(error.message);
    process.exit(1);
  });
}
