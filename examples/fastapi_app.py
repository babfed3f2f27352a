"""A FastAPI application: a request that sends a message, and a consumer in the same process.

    uvicorn examples.fastapi_app:app

The request is answered when the broker has acknowledged the message. The NameServers come from
NAMESRV_ADDR; the default is 127.0.0.1:9876.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from penstock import AsyncConsumer, AsyncProducer, Message, ReceivedMessage

coupons: set[int] = set()


async def grant_coupon(message: ReceivedMessage) -> None:
    coupons.add(json.loads(message.body)["id"])


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    consumer = AsyncConsumer(group="coupons", start_at="first")
    consumer.on("UserRegistered")(grant_coupon)
    async with AsyncProducer(group="signup") as producer, consumer:
        app.state.producer = producer
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/users/{user}")
async def register(user: int) -> dict[str, str]:
    message = Message("UserRegistered", json.dumps({"id": user}), keys=[str(user)])
    receipt = await app.state.producer.send(message)
    return {"message": receipt.message_id}


@app.get("/coupons/{user}")
async def has_coupon(user: int) -> bool:
    return user in coupons
