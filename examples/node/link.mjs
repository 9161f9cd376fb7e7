// One DEALER socket: whole messages out in the order of the calls, whole messages in.

import { decode, encode } from "@msgpack/msgpack";
import { Dealer } from "zeromq";

export class Link {
  #socket;
  #sent = Promise.resolve();

  constructor(endpoint, routingId, onMessage, onDisconnect = () => {}) {
    this.#socket = new Dealer({
      routingId,
      linger: 1000,
      sendHighWaterMark: 0, // the group says when there is too much; nothing is dropped or held up here
      receiveHighWaterMark: 0,
      ...(endpoint.startsWith("tcp://") ? { ipv6: true, heartbeatInterval: 10_000, heartbeatTimeout: 30_000 } : {}),
    });
    this.#socket.events.on("disconnect", onDisconnect);
    this.#socket.connect(endpoint); // reconnects by itself from now on
    this.#receive(onMessage);
  }

  /** Queue a message: its tag, then its fields. ZeroMQ's binding takes one at a time. */
  send(...message) {
    const frame = encode(message, { ignoreUndefined: true });
    this.#sent = this.#sent.then(() => this.#socket.send(frame)).catch(() => {}); // closed meanwhile
  }

  async close() {
    await this.#sent;
    this.#socket.close();
  }

  async #receive(onMessage) {
    for await (const [frame] of this.#socket) onMessage(decode(frame));
  }
}
