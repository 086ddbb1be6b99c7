"""Accept callbacks for tests of transports, which have no tickets: everyone who is certified is admitted at once."""

from __future__ import annotations

from fusionai.transport.interface import Accept, Channel


def admitting(accept: Accept) -> Accept:
    async def admitted(channel: Channel) -> None:
        channel.admit()
        await accept(channel)

    return admitted
