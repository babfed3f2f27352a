"""The settings of a controller."""

from typing import Annotated

from penstock.config.doc import PORT_MAX, Checked, Doc


class ControllerConfig(Checked, frozen=True, forbid_unknown_fields=True):
    """A controller, which decides which replica of a broker is its master."""

    host: Annotated[str, Doc("The address to listen on.", "bindAddress")] = "127.0.0.1"
    port: Annotated[int, Doc("The port to listen on.", "listenPort", most=PORT_MAX)] = 9878
    announce: Annotated[
        str, Doc("The host at which brokers reach this controller. Empty: `controller.host`.")
    ] = ""
    data: Annotated[
        str, Doc("The directory with the state of the broker sets.", path=True)
    ] = "penstock-data/controller"  # fmt: skip
    scan_ms: Annotated[
        int, Doc("How often the controller looks for masters that are dead.",
                 "scanNotActiveBrokerInterval", live=True, least=10)
    ] = 250  # fmt: skip
    unclean_elections: Annotated[
        bool, Doc("If no replica of the in-sync set is alive, elect another one. Messages that it "
                  "does not have are lost.", "enableElectUncleanMaster", live=True)
    ] = False  # fmt: skip
