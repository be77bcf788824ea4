// A camera before which things come and go: gives a picture whenever something new stands still.
//
// Change is measured as the server's live sessions do (docs/protocol.md, section 5): 32 × 32 cells, of sixteen parts and
// three colours the one that differs most, in percent.

import { sentence } from "./sentences.js";
import { watching } from "./watching.js";

const CELLS = 32;
const PART = 8;
const LOOK_EVERY_MS = 350;
const NEW = 6; // percent: something else stands there
const STILL = 2; // percent between two looks: nothing moves
const STILL_LOOKS = 3;
const AGAIN_MS = 2000;
const RESTLESS_MS = 6000; // after so long of movement a picture is taken all the same

/**
 * Opens the camera, shown in a <video>. Throws what getUserMedia throws, or an Error that says why there is none. A
 * camera that is given after the signal has aborted is let go at once.
 */
export async function openCamera(video, signal) {
  if (!navigator.mediaDevices) {
    throw new Error("Browsers give the camera to https pages and to this computer only. Start the server with https.");
  }
  const stream = await navigator.mediaDevices.getUserMedia({
    video: { width: { ideal: 1280 }, facingMode: { ideal: "environment" } },
  });
  if (signal.aborted) {
    for (const track of stream.getTracks()) track.stop();
    signal.throwIfAborted();
  }
  video.srcObject = stream;
  await video.play();
  watching(video, "Camera on");
}

/** What `openCamera` threw, and what helps. */
export function cameraTrouble({ name, message }) {
  if (name === "NotAllowedError") return "The browser did not allow the camera. Allow it beside the address.";
  if (name === "NotFoundError") return "There is no camera here. Plug one in.";
  if (name === "NotReadableError") return "Another program uses the camera. Close it.";
  return sentence(message);
}

/** Switches the camera off. */
export function closeCamera(video) {
  for (const track of video.srcObject?.getTracks() ?? []) track.stop();
  video.srcObject = null;
  watching(video, "");
}

/** The picture of this moment, a JPEG blob of at most 1024 pixels. */
export function takePicture(video) {
  const scale = Math.min(1, 1024 / Math.max(video.videoWidth, video.videoHeight));
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(video.videoWidth * scale);
  canvas.height = Math.round(video.videoHeight * scale);
  canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.9));
}

/**
 * Watches until the signal aborts.
 * @param onMoving  called when what stood there has gone or changed
 * @param onPicture async; called with a blob when something new stands still. Nothing is looked at while it runs. When
 *                  it gives false, the same is taken again later.
 */
export async function watch(video, { onMoving, onPicture }, signal) {
  const canvas = new OffscreenCanvas(CELLS, CELLS).getContext("2d", { willReadFrequently: true });
  let told = null; // what stood there when the last picture was taken
  let last = null;
  let stillLooks = 0;
  let newSince = 0;
  while (!signal.aborted) {
    await new Promise((resolve) => setTimeout(resolve, LOOK_EVERY_MS));
    if (document.hidden || signal.aborted || !video.videoWidth) continue;
    canvas.drawImage(video, 0, 0, CELLS, CELLS);
    const now = canvas.getImageData(0, 0, CELLS, CELLS).data;
    stillLooks = last && change(last, now) < STILL ? stillLooks + 1 : 0;
    last = now;
    if (told && change(told, now) < NEW) {
      newSince = 0;
      continue;
    }
    if (told && !newSince) onMoving();
    newSince ||= performance.now();
    if (stillLooks < STILL_LOOKS && performance.now() - newSince < RESTLESS_MS) continue;
    told = now;
    newSince = 0;
    if ((await onPicture(await takePicture(video))) === false && !signal.aborted) {
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
      told = null;
    }
  }
}

/** How much two thumbnails (RGBA) differ, in percent. */
export function change(one, other) {
  let most = 0;
  for (let top = 0; top < CELLS; top += PART) {
    for (let left = 0; left < CELLS; left += PART) {
      for (let colour = 0; colour < 3; colour++) most = Math.max(most, partChange(one, other, top, left, colour));
    }
  }
  return most;
}

function partChange(one, other, top, left, colour) {
  let sum = 0;
  for (let row = top; row < top + PART; row++) {
    for (let column = left; column < left + PART; column++) {
      const place = (row * CELLS + column) * 4 + colour;
      sum += Math.abs(one[place] - other[place]);
    }
  }
  return (sum / PART ** 2 / 255) * 100;
}
