// A NATS server with JetStream, and loads for it.
//
//	nats server PORT DIRECTORY default|always
//	nats load ADDRESS SUBJECT KIND NAME=VALUE…
package main

import (
	"fmt"
	"os"
)

func main() {
	var err error
	switch {
	case len(os.Args) == 5 && os.Args[1] == "server":
		err = serve(os.Args[2], os.Args[3], os.Args[4])
	case len(os.Args) >= 5 && os.Args[1] == "load":
		err = load(os.Args[2:])
	default:
		err = fmt.Errorf("usage: nats server PORT DIRECTORY default|always")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
