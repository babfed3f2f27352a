package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	drainTimeout    = 20 * time.Second
	backlogTimeout  = 120 * time.Second
	stallTimeout    = 10 * time.Second
	inFlightDefault = 100_000
)

// A client has one connection. Its stream has the name of its subject.
type client struct {
	subject string
	options map[string]string
	stream  jetstream.JetStream
}

func load(arguments []string) error {
	c := &client{subject: arguments[1], options: map[string]string{}}
	for _, argument := range arguments[3:] {
		name, value, _ := strings.Cut(argument, "=")
		c.options[name] = value
	}
	connection, err := nats.Connect("nats://" + arguments[0])
	if err != nil {
		return err
	}
	defer connection.Close()
	inFlight := c.number("in_flight")
	if inFlight == 0 {
		inFlight = inFlightDefault
	}
	c.stream, err = jetstream.New(connection, jetstream.WithPublishAsyncMaxPending(inFlight))
	if err != nil {
		return err
	}
	kinds := map[string]func() error{
		"create": c.create, "sync": c.sync, "pipelined": c.pipelined, "fill": c.fill,
		"consume": c.consume, "rate": c.endToEnd,
	}
	run, known := kinds[arguments[2]]
	if !known {
		return fmt.Errorf("no load %s", arguments[2])
	}
	return run()
}

// number is 0 for an option that is missing.
func (c *client) number(name string) int {
	value, _ := strconv.Atoi(c.options[name])
	return value
}

func (c *client) seconds(name string) time.Duration {
	value, _ := strconv.ParseFloat(c.options[name], 64)
	return time.Duration(value * float64(time.Second))
}

func (c *client) window() *window {
	return newWindow(c.seconds("warm"), c.seconds("seconds"))
}

func (c *client) body() []byte {
	return make([]byte, c.number("size"))
}

// send does not wait for the acknowledgement, except when too many messages are in flight.
func (c *client) send(body []byte) (jetstream.PubAckFuture, error) {
	return c.stream.PublishAsync(c.subject, body, jetstream.WithStallWait(stallTimeout))
}

func (c *client) create() error {
	_, err := c.stream.CreateStream(context.Background(), jetstream.StreamConfig{
		Name: c.subject, Subjects: []string{c.subject}, Storage: jetstream.FileStorage, Replicas: 1,
	})
	return err
}

// sync: each goroutine sends a message and waits for the acknowledgement.
func (c *client) sync() error {
	w := c.window()
	var senders sync.WaitGroup
	for range c.number("threads") {
		senders.Go(func() {
			for w.open() {
				began := time.Now()
				if _, err := c.stream.Publish(context.Background(), c.subject, c.body()); err == nil {
					w.acknowledged(began)
				} else if w.contains(time.Now()) {
					w.failed.Add(1)
				}
			}
		})
	}
	w.announce()
	senders.Wait()
	w.report()
	return nil
}

// pipelined: one goroutine sends without waiting, with a limited number of messages in flight.
func (c *client) pipelined() error {
	w := c.window()
	type pending struct {
		began time.Time
		ack   jetstream.PubAckFuture
	}
	sent := make(chan pending, c.number("in_flight"))
	var receiver sync.WaitGroup
	receiver.Go(w.announce)
	// A connection's acknowledgements come in the order of its messages.
	receiver.Go(func() {
		for one := range sent {
			select {
			case <-one.ack.Ok():
				w.acknowledged(one.began)
			case <-one.ack.Err():
				if w.contains(time.Now()) {
					w.failed.Add(1)
				}
			}
		}
	})
	for w.open() {
		began := time.Now()
		ack, err := c.send(c.body())
		if err != nil {
			return err
		}
		sent <- pending{began, ack}
	}
	close(sent)
	receiver.Wait()
	w.report()
	return nil
}

func (c *client) fill() error {
	for range c.number("messages") {
		if _, err := c.send(c.body()); err != nil {
			return err
		}
	}
	<-c.stream.PublishAsyncComplete()
	return nil
}

func (c *client) consumer(policy jetstream.AckPolicy) (jetstream.Consumer, error) {
	return c.stream.CreateConsumer(context.Background(), c.subject, jetstream.ConsumerConfig{
		Durable: c.options["group"], AckPolicy: policy, MaxAckPending: 100_000,
	})
}

// consume reads a backlog and acknowledges once for each pull.
func (c *client) consume() error {
	consumer, err := c.consumer(jetstream.AckAllPolicy)
	if err != nil {
		return err
	}
	pull, warm := c.number("pull"), c.number("warm_messages")
	wanted := warm + c.number("messages")
	messages, err := consumer.Messages(jetstream.PullMaxMessages(pull))
	if err != nil {
		return err
	}
	defer messages.Stop()
	timeout := time.AfterFunc(backlogTimeout, messages.Stop)
	defer timeout.Stop()
	var began time.Time
	for seen := 1; seen <= wanted; seen++ {
		message, err := messages.Next()
		if err != nil {
			return fmt.Errorf("consumed %d of %d messages: %w", seen, wanted, err)
		}
		if seen%pull == 0 {
			if err := message.Ack(); err != nil {
				return err
			}
		}
		if seen == warm {
			began = time.Now()
			fmt.Println("begin")
		}
	}
	took := time.Since(began)
	fmt.Println("end")
	fmt.Printf(`{"messages":%d,"failed":0,"seconds":%.3f}`+"\n", wanted-warm, took.Seconds())
	return nil
}

// endToEnd sends at a fixed rate. A message carries the time at which it should have been sent, as
// nanoseconds since the program began; a message that is late is sent at once.
func (c *client) endToEnd() error {
	consumer, err := c.consumer(jetstream.AckExplicitPolicy)
	if err != nil {
		return err
	}
	began := time.Now()
	ready := make(chan struct{})
	var w *window
	consuming, err := consumer.Consume(func(message jetstream.Msg) {
		if data := message.Data(); len(data) == 0 {
			close(ready)
		} else {
			w.arrived(began.Add(time.Duration(binary.LittleEndian.Uint64(data))))
		}
		_ = message.Ack()
	})
	if err != nil {
		return err
	}
	defer consuming.Stop()
	w = c.window()
	if _, err := c.stream.Publish(context.Background(), c.subject, nil); err != nil {
		return err
	}
	select {
	case <-ready:
	case <-time.After(drainTimeout):
		return errors.New("the consumer received nothing")
	}
	return c.pace(w, began)
}

func (c *client) pace(w *window, began time.Time) error {
	var announcer sync.WaitGroup
	announcer.Go(w.announce)
	rate, first, due := c.number("rate"), time.Now(), int64(0)
	for count := 0; ; count++ {
		intended := first.Add(time.Duration(float64(count) * 1e9 / float64(rate)))
		if !intended.Before(w.end) {
			break
		}
		if w.contains(intended) {
			due++
		}
		time.Sleep(time.Until(intended))
		body := c.body()
		binary.LittleEndian.PutUint64(body, uint64(intended.Sub(began)))
		if _, err := c.send(body); err != nil {
			return err
		}
	}
	announcer.Wait()
	deadline := time.Now().Add(drainTimeout)
	for w.messages.Load() < due && time.Now().Before(deadline) {
		time.Sleep(10 * time.Millisecond)
	}
	w.failed.Add(due - w.messages.Load())
	w.report()
	return nil
}
