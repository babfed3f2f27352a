package main

import (
	"context"
	"fmt"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

type sending struct{ rocketmq.Producer }

var selectors = map[string]func() producer.QueueSelector{
	"":       producer.NewRoundRobinQueueSelector,
	"hash":   producer.NewHashQueueSelector,
	"manual": producer.NewManualQueueSelector,
}

type producerArguments struct {
	Name, Group, Selector string
	Trace                 bool
}

func startProducer(s *session, a producerArguments) (any, error) {
	options := []producer.Option{
		producer.WithNameServer(s.nameServers),
		producer.WithInstanceName(a.Name),
		producer.WithGroupName(a.Group),
		producer.WithQueueSelector(selectors[a.Selector]()),
	}
	if a.Trace {
		options = append(options, producer.WithTrace(&primitive.TraceConfig{
			GroupName:    a.Group,
			Access:       primitive.Local,
			NamesrvAddrs: s.nameServers,
			Resolver:     primitive.NewPassthroughResolver(s.nameServers),
		}))
	}
	made, err := rocketmq.NewProducer(options...)
	if err != nil {
		return nil, err
	}
	s.clients[a.Name] = sending{made}
	return nil, made.Start()
}

// outgoing is a message as a command describes it; Broker and Queue for the manual selector.
type outgoing struct {
	Topic      string
	Body       []byte
	Flag       int32
	Tags       string
	Keys       []string
	Sharding   string
	Properties map[string]string
	Broker     string
	Queue      int
}

func (o outgoing) message() *primitive.Message {
	message := primitive.NewMessage(o.Topic, o.Body)
	message.Flag = o.Flag
	for name, value := range o.Properties {
		message.WithProperty(name, value)
	}
	message.WithTag(o.Tags).WithKeys(o.Keys).WithShardingKey(o.Sharding)
	message.Queue = &primitive.MessageQueue{
		Topic: o.Topic, BrokerName: o.Broker, QueueId: o.Queue,
	}
	return message
}

// stored is what the broker acknowledged.
type stored struct {
	Status      int    `json:"status"`
	ID          string `json:"id"`
	OffsetID    string `json:"offset_id"`
	Queue       int    `json:"queue"`
	QueueOffset int64  `json:"queue_offset"`
}

type sendArguments struct {
	Name     string
	How      string
	Messages []outgoing
}

func send(s *session, a sendArguments) (any, error) {
	by, err := find[sending](s, a.Name)
	if err != nil {
		return nil, err
	}
	messages := make([]*primitive.Message, len(a.Messages))
	for i, described := range a.Messages {
		messages[i] = described.message()
	}
	switch a.How {
	case "sync":
		return by.each(messages)
	case "async":
		return by.together(messages)
	case "one-way":
		for _, message := range messages {
			if err := by.SendOneWay(context.Background(), message); err != nil {
				return nil, err
			}
		}
		return nil, nil
	case "batch":
		result, err := by.SendSync(context.Background(), messages...)
		if err != nil {
			return nil, err
		}
		return []stored{report(result)}, nil
	}
	return nil, fmt.Errorf("no such way to send: %q", a.How)
}

func (s sending) each(messages []*primitive.Message) ([]stored, error) {
	results := make([]stored, len(messages))
	for i, message := range messages {
		result, err := s.SendSync(context.Background(), message)
		if err != nil {
			return nil, err
		}
		results[i] = report(result)
	}
	return results, nil
}

func (s sending) together(messages []*primitive.Message) ([]stored, error) {
	type outcome struct {
		at     int
		result *primitive.SendResult
		err    error
	}
	outcomes := make(chan outcome, len(messages))
	for i, message := range messages {
		at := i
		called := func(_ context.Context, result *primitive.SendResult, err error) {
			outcomes <- outcome{at, result, err}
		}
		if err := s.SendAsync(context.Background(), called, message); err != nil {
			return nil, err
		}
	}
	results := make([]stored, len(messages))
	for range messages {
		select {
		case one := <-outcomes:
			if one.err != nil {
				return nil, one.err
			}
			results[one.at] = report(one.result)
		case <-time.After(patience):
			return nil, fmt.Errorf("not all were acknowledged in %s", patience)
		}
	}
	return results, nil
}

func report(result *primitive.SendResult) stored {
	return stored{
		Status:      int(result.Status),
		ID:          result.MsgID,
		OffsetID:    result.OffsetMsgID,
		Queue:       result.MessageQueue.QueueId,
		QueueOffset: result.QueueOffset,
	}
}
