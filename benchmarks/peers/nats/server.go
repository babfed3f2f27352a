package main

import (
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

const readyTimeout = 30 * time.Second

// serve runs until a signal ends it. Sync is when stored messages are flushed to disk.
func serve(port, directory, sync string) error {
	number, err := strconv.Atoi(port)
	if err != nil {
		return err
	}
	one, err := server.NewServer(&server.Options{
		ServerName: "peer",
		Host:       "127.0.0.1",
		Port:       number,
		JetStream:  true,
		StoreDir:   directory,
		SyncAlways: sync == "always",
	})
	if err != nil {
		return err
	}
	one.Start()
	if !one.ReadyForConnections(readyTimeout) {
		return fmt.Errorf("not ready within %s", readyTimeout)
	}
	fmt.Println("the NATS server is ready")
	one.WaitForShutdown()
	return nil
}
